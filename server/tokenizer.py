"""Text to token ids and back: the only place that knows the vocabulary as text.

Prompts go through tiktoken where the tokenizer is a byte-level BPE with one regex (7 times faster
on long prompts), else through Hugging Face tokenizers. Outputs are bytes of tokens, decoded as they
come.
"""

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import tiktoken
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as HFTokenizer

_SELF_CHECK = "Hello, wörld!  def f(x):\n\treturn x + 12345 // 7 # naïve 日本語 🙂\r\n\n  end"


class UnsupportedTokenizer(Exception):
    """Its tokens cannot be written as bytes, so stops and text could disagree."""


class TemplateError(Exception):
    """The model's chat template refused these messages."""


class Tokenizer:
    """The tokenizer of a model folder. eos_token_ids: every id that ends an answer."""

    def __init__(self, model_dir: Path) -> None:
        path = model_dir / "tokenizer.json"
        if not path.exists():
            raise UnsupportedTokenizer(f"{path} is missing: only fast tokenizers are served")
        definition = json.loads(path.read_text())
        self._hf = HFTokenizer.from_file(str(path))
        self._hf.no_truncation()
        self._hf.no_padding()
        self.vocabulary = _vocabulary(definition, self._hf.get_vocab_size())
        self._config = _read_json(model_dir / "tokenizer_config.json")
        self._template = _chat_template(model_dir, self._config)
        self.eos_token_ids = _eos_token_ids(model_dir, self._hf, self._config)
        self._fast = _tiktoken(definition, self._hf)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; special tokens in the text are recognized, as chat templates need."""
        if self._fast is None or add_special_tokens and self._adds_special_tokens:
            return self._hf.encode(text, add_special_tokens=add_special_tokens).ids
        return self._fast.encode(text)

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt of a chat, up to where the assistant speaks. Raises TemplateError."""
        if self._template is None:
            raise TemplateError("This model has no chat template; use /v1/completions.")
        special = {
            name: _content(self._config.get(name))
            for name in ("bos_token", "eos_token", "pad_token")
        }
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, raise_exception=_raise, **special
            )
        except jinja2.TemplateError as error:
            raise TemplateError(str(error)) from error

    @property
    def _adds_special_tokens(self) -> bool:
        return bool(self._hf.num_special_tokens_to_add(is_pair=False))


class Detokenizer:
    """The text of one output, as its tokens arrive; never half a character."""

    def __init__(self, vocabulary: Sequence[bytes]) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int], *, final: bool = False, cut_bytes: int = 0) -> str:
        """The text that these tokens add. cut_bytes: of a stop string, at the end, left out."""
        data = b"".join(self._vocabulary[i] for i in token_ids if i < len(self._vocabulary))
        return self._decoder.decode(data[: len(data) - cut_bytes], final)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _content(token: Any) -> str:
    """A special token's text; older files wrap it in an object."""
    return token["content"] if isinstance(token, dict) else token or ""


def _chat_template(model_dir: Path, config: dict[str, Any]) -> jinja2.Template | None:
    file = model_dir / "chat_template.jinja"
    source = file.read_text() if file.exists() else config.get("chat_template")
    if not isinstance(source, str):
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, ensure_ascii=False, **options
    )
    return environment.from_string(source)


def _eos_token_ids(model_dir: Path, hf: HFTokenizer, config: dict[str, Any]) -> tuple[int, ...]:
    """Every id that ends an answer, from all the places where models say so."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(model_dir / name).get("eos_token_id")
        found |= set(value) if isinstance(value, list) else {value} if value is not None else set()
    named = hf.token_to_id(_content(config.get("eos_token")))
    return tuple(sorted(found | ({named} if named is not None else set())))


# ---- tokens as bytes ----


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE writes bytes (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _vocabulary(definition: dict[str, Any], size: int) -> list[bytes]:
    """Token id -> its bytes in the text; special tokens have none."""
    kinds = _decoder_kinds(definition.get("decoder") or {})
    if "ByteLevel" in kinds:
        alphabet = _byte_alphabet()

        def convert(token: str) -> bytes:
            return bytes(alphabet[c] for c in token)
    elif "ByteFallback" in kinds:

        def convert(token: str) -> bytes:
            if len(token) == 6 and token.startswith("<0x"):
                return bytes([int(token[3:5], 16)])
            return token.replace("\u2581", " ").encode()
    else:
        raise UnsupportedTokenizer(f"the decoder {sorted(kinds)} is not byte-level")
    table = [b""] * size
    added = {token["id"]: token for token in definition.get("added_tokens", [])}
    for token, token_id in definition["model"]["vocab"].items():
        if token_id not in added:
            table[token_id] = convert(token)
    for token_id, token in added.items():
        if not token.get("special"):
            table[token_id] = token["content"].encode()
    return table


def _decoder_kinds(decoder: dict[str, Any]) -> set[str]:
    nested = [_decoder_kinds(d) for d in decoder.get("decoders", [])]
    return {decoder.get("type", "none")}.union(*nested)


# ---- tiktoken ----


class _FastEncoding:
    """tiktoken's merges with the model's own ids: tiktoken ranks by id, so ranks are permuted."""

    def __init__(self, encoding: tiktoken.Encoding, ids: list[int]) -> None:
        self._encoding = encoding
        self._ids = ids

    def encode(self, text: str) -> list[int]:
        return [self._ids[rank] for rank in self._encoding.encode(text, allowed_special="all")]


def _tiktoken(definition: dict[str, Any], hf: HFTokenizer) -> _FastEncoding | None:
    """A fast equal of `hf`, or None where its rules are not tiktoken's."""
    model = definition["model"]
    pattern = _only_pattern(definition.get("pre_tokenizer"))
    if model["type"] != "BPE" or definition.get("normalizer") or pattern is None:
        return None
    alphabet, vocab = _byte_alphabet(), model["vocab"]
    added = {token["content"]: token["id"] for token in definition.get("added_tokens", [])}
    pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    # Merge order is rank order: the 256 bytes first, then the merges, then what nothing merges
    # into.
    order = [c for c in alphabet if c in vocab] + [left + right for left, right in pairs]
    order += [token for token in vocab if token not in added]
    tokens = [token for token in dict.fromkeys(order) if token not in added]
    ranks = {bytes(alphabet[c] for c in token): rank for rank, token in enumerate(tokens)}
    special = {token: len(tokens) + i for i, token in enumerate(added)}
    encoding = tiktoken.Encoding(
        "model", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
    )
    fast = _FastEncoding(encoding, [vocab[token] for token in tokens] + list(added.values()))
    equal = fast.encode(_SELF_CHECK) == hf.encode(_SELF_CHECK, add_special_tokens=False).ids
    return fast if equal else None


def _only_pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """The one regex that splits text before byte-level BPE; None where it is not that simple."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    patterns: list[str] = []
    for step in steps:
        if step is None or step["type"] not in ("Split", "ByteLevel"):
            return None
        if step["type"] == "Split":
            if step.get("behavior") != "Isolated" or "Regex" not in step["pattern"]:
                return None
            patterns.append(step["pattern"]["Regex"])
        elif step.get("add_prefix_space"):
            return None
        elif step.get("use_regex", True):
            patterns.append(
                r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
            )
    return patterns[0] if len(patterns) == 1 else None
