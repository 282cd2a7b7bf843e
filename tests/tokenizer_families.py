"""Small tokenizers with the pipelines of real model families, trained on this repository's prose.

Each has the parts of its family's tokenizer.json: normalizer, splitting, model, decoder,
post-processor, added tokens. Only the vocabulary is small.
"""

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from server.text.tiktoken_encoding import LLAMA3, QWEN2

FAMILIES = ("llama2", "llama3", "mistral", "qwen2")
SPACE = "\u2581"

_ROOT = Path(__file__).parent.parent
_VOCAB_SIZE = 2048
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def make_tokenizer(family: str) -> Tokenizer:
    """Return a new tokenizer of a family, the same every time."""
    return Tokenizer.from_str(_trained(family))


def corpus() -> str:
    """Return a text of code and sentences that rarely change, and a little of other scripts."""
    sources = sorted((_ROOT / "demo").glob("*.py"))
    pages = [path.read_text(encoding="utf-8") for path in sources]
    return "\n".join(
        [*pages, "日本語のテキスト。中文文本。Привет, мир! naïve café Größe 🙂👍🏽 مرحبا สวัสดี\n"]
    )


@cache
def _trained(family: str) -> str:
    make = {"llama2": _llama2, "llama3": _llama3, "mistral": _mistral, "qwen2": _qwen2}[family]
    tokenizer: Tokenizer = make()
    text: str = tokenizer.to_str()
    return text


def _llama3() -> Tokenizer:
    tokenizer = _byte_level(LLAMA3)
    tokenizer.model.ignore_merges = True
    _add(tokenizer, special=["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    _add(tokenizer, special=["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"])
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), _begins_with(tokenizer, "<|begin_of_text|>")]
    )
    return tokenizer


def _qwen2() -> Tokenizer:
    tokenizer = _byte_level(QWEN2)
    tokenizer.normalizer = normalizers.NFC()
    _add(tokenizer, special=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    _add(tokenizer, plain=["<tool_call>", "</tool_call>", "<think>", "</think>"])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _llama2() -> Tokenizer:
    """Pipeline as converted from SentencePiece until 2024: a normalizer prepends a space."""
    tokenizer = _sentencepiece()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    return tokenizer


def _mistral() -> Tokenizer:
    """Pipeline as converted since: a pre-tokenizer prepends a space to a text's first word only."""
    tokenizer = _sentencepiece()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    _add(tokenizer, special=["[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"])
    return tokenizer


def _byte_level(pattern: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [corpus()],
        trainers.BpeTrainer(vocab_size=_VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False),
    )
    return tokenizer


def _sentencepiece() -> Tokenizer:
    """BPE on characters; those without a token become tokens of bytes. Merges stay within words."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(vocab_size=_VOCAB_SIZE, show_progress=False)
    trained.train_from_iterator(re.findall("[^\n]+", corpus()), trainer)
    learned = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *_BYTES, *learned["vocab"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: index for index, name in enumerate(dict.fromkeys(names))},
            merges=[tuple(merge) for merge in learned["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    _add(tokenizer, special=["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = _begins_with(tokenizer, "<s>")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


def _add(tokenizer: Tokenizer, special: Iterable[str] = (), plain: Iterable[str] = ()) -> None:
    """Add tokens that are found before the text is normalized, as in the families' files."""
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in plain])


def _begins_with(tokenizer: Tokenizer, token: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=f"{token} $A",
        pair=f"{token} $A {token} $B",
        special_tokens=[(token, tokenizer.token_to_id(token))],
    )
