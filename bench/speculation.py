"""`python -m bench.speculation`: SmolLM2 with drafts and without, by kind of text and batch.

One engine serves the same requests both ways, in turns; each figure is a median over the turns.
Tokens are counted from the moment when all requests of a batch have their first token, per second
of processor time. "without" gives an answer one token a step. Wants `make model`.
"""

import inspect
import random
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any, ClassVar

from jinja2 import Template
from tokenizers import Tokenizer

from bench.checkpoint import THREADS
from bench.grammar import json_grammar, object_of
from bench.in_process import EngineFactory
from bench.measurement import Figures, Measurement, Row, in_turns, main
from bench.report import percentiles_ms, ratio, rounded
from bench.session import Ask, Session
from engine.core import EngineCore

_ARENA_TOKENS = 48_000
_LEAST_ASKS, _MOST_ASKS = 4, 64
_RANDOM_TOKENS = 128
_FUNCTIONS: tuple[Any, ...] = (
    textwrap.wrap,
    textwrap.indent,
    textwrap.shorten,
    inspect.getdoc,
    inspect.cleandoc,
    inspect.getmodulename,
    inspect.formatannotation,
    random.Random.shuffle,
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


def _edits() -> list[str]:
    """Functions of Python's library, to be repeated with a small change."""
    wish = "Repeat this code exactly, but name the function `changed`:\n\n```python\n"
    sources = [textwrap.dedent(inspect.getsource(function))[:1600] for function in _FUNCTIONS]
    return [f"{wish}{source}```" for source in sources]


def _extractions() -> list[str]:
    """Paragraphs of Python's documentation, of which a part is to be quoted."""
    texts = {text: None for name in sorted(topics)[::4] for text in topics[name].split("\n\n")}
    long = [text for text in texts if 600 < len(text) < 1200]
    return [f"Quote the first four sentences of this text word by word:\n\n{t}" for t in long[:8]]


def _orders() -> list[str]:
    return [f"Make a list of orders of shop {number} as JSON." for number in range(8)]


_QUESTIONS_OF: dict[str, Callable[[], Sequence[str]]] = {
    "edit": _edits,
    "extraction": _extractions,
    "json": _orders,
    "chat": lambda: _QUESTIONS,
}
KINDS = (*_QUESTIONS_OF, "random")
"""Applications whose answers repeat their prompts much, little, or not at all."""


@dataclass(frozen=True, kw_only=True)
class Speculation(Measurement):
    """The gain by drafts.   kinds: of KINDS.   batches: numbers of requests at a time."""

    told_apart: ClassVar = ("kind", "batch", "model", "quantization")

    model: str = "smollm2"
    kinds: tuple[str, ...] = KINDS
    batches: tuple[int, ...] = (1, 4, 8, 16, 32)
    output_tokens: int = 64
    turns: int = 3
    quantization: str | None = None

    def rows(self, bench: str, folder: Path) -> Iterator[Row]:
        factory = EngineFactory.of(self.model, folder)
        core = factory.make(
            arena_tokens=_ARENA_TOKENS,
            max_model_len=2048,
            quantization=self.quantization,
            speculation="auto",
            prefix_caching=False,
        )
        for kind in self.kinds:
            asks = self._asks(kind, factory)
            for size in self.batches:
                setup = {
                    "system": "Chorale, C",
                    "kind": kind,
                    "batch": size,
                    "model": self.model,
                    "quantization": self.quantization,
                    "output_tokens": self.output_tokens,
                    "turns": self.turns,
                    "threads": THREADS,
                }
                batches = partial(_serve, core, asks[: max(size, _LEAST_ASKS)], size)
                without, with_drafts = in_turns(
                    self.turns,
                    partial(batches, has_drafts=False),
                    partial(batches, has_drafts=True),
                )
                yield bench, setup, _result(without, with_drafts)

    def _asks(self, kind: str, factory: EngineFactory) -> list[Ask]:
        if kind == "random":  # tokens without any sense
            stream = random.Random(0)
            prompts = [factory.random_tokens(stream, _RANDOM_TOKENS) for _ in range(8)]
        else:
            prompts = _prompts(_QUESTIONS_OF[kind](), factory.model_dir)
        orders = json_grammar({"type": "array", "items": _ORDER, "minItems": 1000})
        ask = Ask(
            (),
            self.output_tokens,
            grammar=orders if kind == "json" else "",
            # A small model repeats itself when it is greedy, which here nothing may do.
            temperature=1.0 if kind == "random" else 0.0,
        )
        repeated = (prompts[i % len(prompts)] for i in range(_MOST_ASKS))
        return [replace(ask, prompt_token_ids=prompt) for prompt in repeated]


def _prompts(questions: Sequence[str], model_dir: Path) -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    template = Template((model_dir / "chat_template.jinja").read_text())
    chats = [[{"role": "user", "content": question}] for question in questions]
    texts = [template.render(messages=chat, add_generation_prompt=True) for chat in chats]
    return [tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]


@dataclass(frozen=True)
class _Run:
    """One turn.   drafts: (drafted, accepted) tokens.   token_ids: of all answers."""

    tokens_per_cpu_s: float
    gaps_s: Sequence[float]
    tokens_per_row: float
    drafts: tuple[int, int]
    token_ids: Sequence[Sequence[int]]


def _serve(core: EngineCore, asks: Sequence[Ask], size: int, *, has_drafts: bool) -> _Run:
    """Serve `asks` in batches of `size`."""
    before = core.take_stats().drafts
    num_tokens, num_rows, cpu_s = 0, 0, 0.0
    gaps_s: list[float] = []
    token_ids: list[Sequence[int]] = []
    for first in range(0, len(asks), size):
        session = Session(core)
        sent = [session.send(replace(ask, drafts=has_drafts)) for ask in asks[first : first + size]]
        while not all(map(session.num_tokens, sent)):
            session.step()
        num_before = sum(map(session.num_tokens, sent))
        begun_s = time.process_time()
        while session.num_open:
            num_rows += session.num_open
            session.step()
        cpu_s += time.process_time() - begun_s
        outcomes = session.outcomes()
        num_tokens += sum(len(o.token_ids) for o in outcomes) - num_before
        gaps_s += [gap for o in outcomes for gap in o.gaps_s]
        token_ids += [o.token_ids for o in outcomes]
    now = core.take_stats().drafts
    drafted = now.drafted_tokens - before.drafted_tokens
    accepted = now.accepted_tokens - before.accepted_tokens
    speed, per_row = num_tokens / cpu_s, num_tokens / num_rows
    return _Run(speed, gaps_s, per_row, (drafted, accepted), token_ids)


def _result(without: Sequence[_Run], with_drafts: Sequence[_Run]) -> Figures:
    turns = zip(with_drafts, without, strict=True)
    ratios = [ours.tokens_per_cpu_s / plain.tokens_per_cpu_s for ours, plain in turns]
    drafted, accepted = with_drafts[0].drafts
    return {
        "speedup": rounded(median(ratios)),
        "speedups": [rounded(value) for value in ratios],
        "tokens_per_cpu_s": rounded(median(run.tokens_per_cpu_s for run in with_drafts)),
        "tokens_per_cpu_s_without": rounded(median(run.tokens_per_cpu_s for run in without)),
        "tokens_per_row": rounded(with_drafts[0].tokens_per_row),
        "drafted": drafted,
        "acceptance": ratio(accepted, drafted) if drafted else None,
        "itl_ms": percentiles_ms(gap for run in with_drafts for gap in run.gaps_s),
        "itl_ms_without": percentiles_ms(gap for run in without for gap in run.gaps_s),
        "valid": all(run.token_ids == without[0].token_ids for run in (*without, *with_drafts)),
    }


if __name__ == "__main__":
    main("bench.speculation", {"speculation": Speculation()}, __doc__)
