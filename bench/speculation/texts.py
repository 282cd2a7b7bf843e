"""Prompts of applications: they repeat their prompts much, little, or not at all."""

import inspect
import random
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType

from jinja2 import Template
from tokenizers import Tokenizer

from bench.grammar.schemas import json_grammar, object_of
from bench.quantization.text import paragraphs

_FUNCTIONS: tuple[FunctionType, ...] = (
    textwrap.wrap,
    textwrap.indent,
    textwrap.shorten,
    inspect.getdoc,
    inspect.cleandoc,
    inspect.getmodulename,
    inspect.formatannotation,
    random.Random.shuffle,  # type: ignore[list-item]
)
_QUESTIONS = (
    "What should I see in Lisbon in three days?",
    "Explain how a refrigerator works to a child.",
    "Write a short story about a lighthouse keeper.",
    "How do I start to learn the piano as an adult?",
    "Why did the Roman empire fall?",
    "Give me ideas for a birthday party with a small budget.",
    "What is the difference between weather and climate?",
    "Describe a meal that you would cook for ten guests.",
)
_RANDOM_TOKENS = 128
_PERSON = {"name": {"type": "string", "maxLength": 24}, "age": {"type": "integer"}}
_ORDER = object_of(
    {
        "order_number": {"type": "integer"},
        "customer": object_of(_PERSON),
        "shipping_address": {"type": "string", "maxLength": 32},
        "payment_method": {"enum": ["credit_card", "bank_transfer", "cash_on_delivery"]},
        "is_confirmed": {"type": "boolean"},
    }
)
GRAMMAR = json_grammar({"type": "array", "items": _ORDER, "minItems": 1000})


class Texts:
    """Prompts for a model of `make model`."""

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._template = Template((model_dir / "chat_template.jinja").read_text())

    def edits(self) -> list[tuple[int, ...]]:
        """Functions of Python's library, to be repeated with a small change."""
        return [self._chat(_edit(function)) for function in _FUNCTIONS]

    def extractions(self) -> list[tuple[int, ...]]:
        """Paragraphs of Python's documentation, of which a part is to be quoted."""
        long = [text for text in paragraphs(is_held_out=True) if 600 < len(text) < 1200]
        wish = "Quote the first four sentences of this text word by word:\n\n"
        return [self._chat(wish + text) for text in long[:8]]

    def chats(self) -> list[tuple[int, ...]]:
        return [self._chat(question) for question in _QUESTIONS]

    def orders(self) -> list[tuple[int, ...]]:
        """Wishes for JSON, whose answers have the shape of GRAMMAR."""
        return [self._chat(f"Make a list of orders of shop {i} as JSON.") for i in range(8)]

    def random(self) -> list[tuple[int, ...]]:
        """Tokens without any sense."""
        stream, most = random.Random(0), self._tokenizer.get_vocab_size()
        return [tuple(stream.randrange(most) for _ in range(_RANDOM_TOKENS)) for _ in range(8)]

    def _chat(self, question: str) -> tuple[int, ...]:
        messages = [{"role": "user", "content": question}]
        text = self._template.render(messages=messages, add_generation_prompt=True)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _edit(function: FunctionType) -> str:
    source = textwrap.dedent(inspect.getsource(function))[:1600]
    return f"Repeat this code exactly, but name the function `changed`:\n\n```python\n{source}```"


@dataclass(frozen=True)
class Kind:
    """Requests of one kind.   prompts: makes eight of them.   grammar: of their answers."""

    prompts: Callable[[Texts], Sequence[tuple[int, ...]]]
    grammar: str = ""
    temperature: float = 0.0


KINDS = {
    "edit": Kind(Texts.edits),
    "extraction": Kind(Texts.extractions),
    "json": Kind(Texts.orders, GRAMMAR),
    "chat": Kind(Texts.chats),
    # A small model repeats itself when it is greedy, which here nothing may do.
    "random": Kind(Texts.random, temperature=1.0),
}
