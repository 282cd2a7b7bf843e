"""Parts of a tokenizer that an adapter has of its own: tokens, chat template, end of answers.

In everything else the tokenizer must be the base model's. Libraries write one tokenizer in several
forms, so what is compared is what a part does to a text's token ids.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

from registry.chat_template import ChatTemplate, TemplateError, special_tokens
from registry.errors import InvalidAdapter, TooLarge, shown
from registry.strict_json import parse_object

Json = dict[str, Any]
Source = Path | int
"""A file by its path or by its open descriptor."""

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 64 << 10
"""The longest of the known models' templates has 17 kB."""
TOKENIZER_FILES = {
    TOKENIZER: 64 << 20,
    TOKENIZER_CONFIG: 4 << 20,
    CHAT_TEMPLATE: MAX_TEMPLATE_BYTES,
}
"""Files that an upload may have beside the adapter's two, and the limits of their bytes."""

MAX_ADDED_TOKENS = 1024
MAX_TOKEN_BYTES = 128
_MAX_VARIABLES = 16
_MAX_DEPTH = 16
_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")
_LISTS = ("normalizers", "pretokenizers", "decoders", "processors")


@dataclass(frozen=True, slots=True)
class BaseText:
    """A base model's tokenizer.json, None without one; its chat template and special tokens."""

    tokenizer: Source | None = None
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)


def find_own(files: Mapping[str, Source], base: BaseText, num_ids: int) -> Json | None:
    """Find what the uploaded files have that the base model's tokenizer has not; None for nothing.

    The result has `added_tokens`, `chat_template`, `eos_token_ids` and `special_tokens` (variables
    of the template), each only if there are any.   num_ids: ids below it have an embedding.
    Raises InvalidAdapter, TooLarge.
    """
    given = {name: _read(name, source) for name, source in files.items()}
    if not given:
        return None
    raw = given.get(TOKENIZER_CONFIG, b"{}")
    config = parse_object(raw, param=TOKENIZER_CONFIG, max_depth=_MAX_DEPTH)
    try:
        bases = _base_definition(base)
        added = _added_tokens(given.get(TOKENIZER), bases, num_ids)
        template = _template(given.get(CHAT_TEMPLATE), config, base)
        own = {"added_tokens": added, "chat_template": template} | _named(
            special_tokens(config), template, base, bases, added
        )
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise InvalidAdapter(
            code="invalid_tokenizer",
            message=f"{TOKENIZER} or {TOKENIZER_CONFIG} is not in the form that the tokenizers "
            f"library writes ({type(error).__name__}); save the tokenizer again.",
            param=TOKENIZER,
        ) from error
    return {name: value for name, value in own.items() if value} or None


def summary(own: Json) -> Json:
    """Make the summary that a passport shows."""
    return {
        "added_tokens": len(own.get("added_tokens", ())),
        "has_chat_template": "chat_template" in own,
        "eos_token_ids": own.get("eos_token_ids", []),
    }


def _read(name: str, source: Source) -> bytes:
    with open(source, "rb") as file:
        found = file.read(TOKENIZER_FILES[name] + 1)
    if len(found) > TOKENIZER_FILES[name]:
        raise TooLarge(what=name, size_bytes=len(found), limit_bytes=TOKENIZER_FILES[name])
    return found


# ---- added tokens ----


@dataclass(frozen=True, slots=True)
class _Definition:
    """A tokenizer.json.   added: the added tokens by text, with the ids that loading gives them."""

    raw: bytes
    parts: Json
    added: dict[str, Json]

    @property
    def vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self.parts["model"]["vocab"]
        return vocab

    def id_of(self, token: str) -> int | None:
        return self.added[token]["id"] if token in self.added else self.vocab.get(token)


def _base_definition(base: BaseText) -> _Definition | None:
    if base.tokenizer is None:
        return None
    with open(base.tokenizer, "rb") as file:
        raw = file.read()
    parts = json.loads(raw)
    return _Definition(raw, parts, _loaded_tokens(parts))


def _loaded_tokens(parts: Json) -> dict[str, Json]:
    """The added tokens by text. Loading closes gaps between ids, so the file's may differ."""
    vocab, found, top = parts["model"]["vocab"], {}, -1
    for token in parts.get("added_tokens") or ():
        text = token["content"]
        if not text or text in found:
            continue
        token_id = int(vocab.get(text, max(top + 1, len(vocab))))
        top = max(top, token_id)
        found[text] = {"id": token_id, "content": text} | {n: bool(token[n]) for n in _FLAGS}
    return found


def _added_tokens(raw: bytes | None, of_base: _Definition | None, num_ids: int) -> list[Json]:
    """The added tokens that the base model lacks, or has with other properties, by id."""
    if raw is None:
        return []
    if of_base is None:
        raise _fault("tokenizer_mismatch", TOKENIZER, "the base model has no tokenizer.json to fit")
    if raw == of_base.raw:
        return []
    parts = parse_object(raw, param=TOKENIZER, max_depth=_MAX_DEPTH)
    own = _Definition(raw, parts, _loaded_tokens(parts))
    _check_vocab(own.vocab, of_base.vocab)
    _check_parts(own, of_base)
    for text, token in of_base.added.items():
        has = own.added.get(text)
        if has is None or has["id"] != token["id"]:
            _refuse_token(text, has["id"] if has else None, token["id"])
    found = [token for text, token in own.added.items() if token != of_base.added.get(text)]
    return _bounded(sorted(found, key=lambda token: token["id"]), num_ids)


def _bounded(tokens: list[Json], num_ids: int) -> list[Json]:
    if len(tokens) > MAX_ADDED_TOKENS:
        message = f"it adds {len(tokens)} tokens; the limit is {MAX_ADDED_TOKENS}"
        raise _fault("invalid_tokenizer", TOKENIZER, message)
    for token in tokens:
        text, size_bytes = token["content"], len(token["content"].encode())
        if size_bytes > MAX_TOKEN_BYTES:
            message = f"the added token {shown(text)} has {size_bytes} bytes; the limit is "
            raise _fault("invalid_tokenizer", TOKENIZER, f"{message}{MAX_TOKEN_BYTES}")
        if token["id"] >= num_ids:
            raise _fault(
                "tokenizer_mismatch",
                TOKENIZER,
                f"the added token {shown(text)} has the id {token['id']}, but the model has "
                f"embeddings of {num_ids} tokens; save the adapter with its embeddings",
            )
    return tokens


def _check_vocab(own: dict[str, int], of_base: dict[str, int]) -> None:
    if own == of_base:
        return
    differing = [(i, token) for token, i in of_base.items() if own.get(token) != i]
    if differing:
        token_id, token = min(differing)
        _refuse_token(token, own.get(token), token_id)
    token_id, token = min((i, token) for token, i in own.items() if token not in of_base)
    _refuse_token(token, token_id, None)


def _refuse_token(token: str, own_id: int | None, base_id: int | None) -> NoReturn:
    own, of_base = ("no id" if i is None else f"the id {i}" for i in (own_id, base_id))
    raise _fault(
        "tokenizer_mismatch",
        TOKENIZER,
        f"token {shown(token)} has {own}, the base model's {of_base}",
    )


def _check_parts(own: _Definition, of_base: _Definition) -> None:
    """Check everything but the tokens. The error names the field that differs."""
    _check_merges(own.parts["model"].get("merges"), of_base.parts["model"].get("merges"))
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        if _steps(own.parts.get(name), name) != _steps(of_base.parts.get(name), name):
            _refuse_part(name)
    if _around(own) != _around(of_base):
        _refuse_part("post_processor")
    options, known = _options(own.parts["model"]), _options(of_base.parts["model"])
    for name in sorted({*options, *known}):
        if options.get(name) != known.get(name):
            _refuse_part(f"model.{name}")


def _check_merges(own: Any, of_base: Any) -> None:
    """Compare merges, which are written as "a b" or as ["a", "b"]."""
    for place, (merge, known) in enumerate(zip_longest(own or (), of_base or ())):
        if merge != known and _pair(merge) != _pair(known):
            _refuse_part(f"model.merges[{place}]")


def _pair(merge: Any) -> tuple[str, ...]:
    return tuple(merge.split(" ") if isinstance(merge, str) else merge or ())


def _options(model: Json) -> Json:
    """The model's options apart from those without effect, which some libraries leave out."""
    options = {"type": "BPE"} | model
    return {
        name: value
        for name, value in options.items()
        if name not in ("vocab", "merges") and value not in (None, "", False)
    }


def _steps(part: Json | None, role: str) -> list[Json]:
    """The steps of a part in order, without options that change no id."""
    if part is None:
        return []
    nested = next((part[name] for name in _LISTS if name in part), None)
    if nested is not None:
        return [step for inner in nested for step in _steps(inner, role)]
    step = {name: value for name, value in part.items() if name not in ("trim_offsets", "str_rep")}
    if step["type"] == "ByteLevel":
        step = {"use_regex": True} | step
    if step["type"] == "Metaspace":
        # Until 2023 it had `add_prefix_space` in place of `prepend_scheme`.
        scheme = "always" if step.pop("add_prefix_space", True) else "never"
        step = {"prepend_scheme": scheme, "split": True} | step
    if role == "decoder":
        # Answers are made of the bytes of tokens, on which these have no effect.
        for name in ("use_regex", "add_prefix_space", "prepend_scheme", "split"):
            step.pop(name, None)
    return [step]


def _around(definition: _Definition) -> tuple[list[int], list[int]]:
    """The ids that a post-processor puts before and after a text."""
    before: list[int] = []
    after: list[int] = []
    for step in _steps(definition.parts.get("post_processor"), "post_processor"):
        if step["type"] == "TemplateProcessing":
            names = [piece.get("SpecialToken", {}).get("id") for piece in step["single"]]
            ids = [step["special_tokens"][name]["ids"] if name else [] for name in names]
            place = names.index(None)
            before = sum(ids[:place], before)
            after = sum(ids[place:], after)
    return before, after


def _refuse_part(path: str) -> NoReturn:
    raise _fault("tokenizer_mismatch", f"{TOKENIZER}:{path}", "it is not as the base model has it")


# ---- the chat template and the tokens that it names ----


def _template(raw: bytes | None, config: Json, base: BaseText) -> str | None:
    """The chat template, if it is another than the base model's."""
    param, template = CHAT_TEMPLATE, None if raw is None else raw.decode()
    if template is None:
        param, template = f"{TOKENIZER_CONFIG}:chat_template", config.get("chat_template")
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default")
    if template is None or _ended(template) == _ended(base.chat_template or ""):
        return None
    if len(template.encode()) > MAX_TEMPLATE_BYTES:
        size_bytes = len(template.encode())
        raise TooLarge(what=param, size_bytes=size_bytes, limit_bytes=MAX_TEMPLATE_BYTES)
    try:
        ChatTemplate({"default": template}, {})
    except TemplateError as error:
        raise _fault("invalid_chat_template", param, f"it does not parse: {error}") from error
    return str(template)


def _ended(template: str) -> str:
    """A template without the line end that Jinja does not read."""
    return template.removesuffix("\n")


def _named(
    own: Mapping[str, str],
    template: str | None,
    base: BaseText,
    of_base: _Definition | None,
    added: list[Json],
) -> Json:
    """The token that ends answers, and the special tokens that the template has as variables.

    own: of the uploaded config, empty without one.   added: gets a token that only the config names
    special.
    """
    source = template or base.chat_template or ""
    variables = {
        name: text
        for name, text in own.items()
        if text != base.special_tokens.get(name) and name in source
    }
    if len(variables) > _MAX_VARIABLES or any(
        len(text.encode()) > MAX_TOKEN_BYTES for text in variables.values()
    ):
        message = (
            f"it has over {_MAX_VARIABLES} special tokens, or one over {MAX_TOKEN_BYTES} bytes"
        )
        raise _fault("invalid_tokenizer", TOKENIZER_CONFIG, message)
    eos = own.get("eos_token")
    if eos is None or eos == base.special_tokens.get("eos_token"):
        return {"special_tokens": variables}
    token = next((token for token in added if token["content"] == eos), None)
    if token is None and of_base and (eos_id := of_base.id_of(eos)) is not None:
        token = of_base.added.get(eos) or {"id": eos_id, "content": eos}
        if not token.get("special"):
            token = dict.fromkeys(_FLAGS, False) | token
            added.append(token)
    if token is None:
        return {"special_tokens": variables}
    token["special"] = True
    return {"special_tokens": variables, "eos_token_ids": [token["id"]]}


def _fault(code: str, param: str, message: str) -> InvalidAdapter:
    return InvalidAdapter(
        code=code,
        message=f"{param}: {message}. An upload without the tokenizer's files has the base model's "
        "tokenizer and template.",
        param=param,
    )
