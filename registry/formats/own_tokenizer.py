"""Tokens, chat template and ends of answers that an adapter's tokenizer has of its own.

In everything else the tokenizer must be the base model's. Libraries write one tokenizer in several
forms, so what is compared is what a component does to a text's token ids.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

from registry.errors import InvalidAdapter, TooLarge, shown
from registry.formats.chat_template import ChatTemplate, TemplateError, special_tokens
from registry.formats.peft_format import file_fault
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

MAX_OWN_TOKENS = 1024
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
        named, of_base = special_tokens(config), _Tokenizer.of_base(base.tokenizer)
        eos, pad = named.get("eos_token"), named.get("pad_token")
        added = _added_tokens(given.get(TOKENIZER), of_base)
        template = _template(given.get(CHAT_TEMPLATE), config, base)
        own = {
            "chat_template": template,
            "special_tokens": _variables(named, template, base),
            "eos_token_ids": _ends(eos, added, base, of_base),
            "added_tokens": _bounded(added, num_ids, pad if pad != eos else None),
        }
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        message = f"{TOKENIZER} or {TOKENIZER_CONFIG} is not in the form that the tokenizers "
        message += f"library writes ({type(error).__name__}); save the tokenizer again"
        raise file_fault("invalid_tokenizer", message, TOKENIZER) from error
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
        raise TooLarge.of(name, len(found), TOKENIZER_FILES[name])
    return found


# ---- added tokens ----


class _Tokenizer:
    """A tokenizer.json.   added: the added tokens by text, with the ids that loading gives them."""

    def __init__(self, raw: bytes, definition: Json) -> None:
        self.raw = raw
        self.definition = definition
        self.vocab: dict[str, int] = definition["model"]["vocab"]
        self.added = _loaded_tokens(definition)

    @classmethod
    def of_base(cls, source: Source | None) -> "_Tokenizer | None":
        if source is None:
            return None
        with open(source, "rb") as file:
            raw = file.read()
        return cls(raw, json.loads(raw))


def _loaded_tokens(definition: Json) -> dict[str, Json]:
    """The added tokens by text. Loading closes gaps between ids, so the file's may differ."""
    vocab, found, top = definition["model"]["vocab"], {}, -1
    for token in definition.get("added_tokens") or ():
        text = token["content"]
        if not text or text in found:
            continue
        token_id = int(vocab.get(text, max(top + 1, len(vocab))))
        top = max(top, token_id)
        found[text] = {"id": token_id, "content": text} | {n: bool(token[n]) for n in _FLAGS}
    return found


def _added_tokens(raw: bytes | None, of_base: _Tokenizer | None) -> list[Json]:
    """The added tokens that the base model lacks, or has with other properties."""
    if raw is None:
        return []
    if of_base is None:
        raise _fault("tokenizer_mismatch", TOKENIZER, "the base model has no tokenizer.json to fit")
    if raw == of_base.raw:
        return []
    own = _Tokenizer(raw, parse_object(raw, param=TOKENIZER, max_depth=_MAX_DEPTH))
    _check_vocab(own.vocab, of_base.vocab)
    _check_components(own, of_base)
    for text, token in of_base.added.items():
        has = own.added.get(text)
        if has is None or has["id"] != token["id"]:
            _refuse_token(text, has["id"] if has else None, token["id"])
    return [token for text, token in own.added.items() if token != of_base.added.get(text)]


def _bounded(tokens: list[Json], num_ids: int, pad: str | None) -> list[Json]:
    """The tokens in order of their ids. One that only fills batches up in training needs no row."""
    kept = [token for token in tokens if token["id"] < num_ids or token["content"] != pad]
    longest = max((len(token["content"].encode()) for token in kept), default=0)
    if len(kept) > MAX_OWN_TOKENS or longest > MAX_TOKEN_BYTES:
        message = f"it adds {len(kept)} tokens of {longest} bytes; the limits are "
        message += f"{MAX_OWN_TOKENS} tokens of {MAX_TOKEN_BYTES} bytes"
        raise _fault("invalid_tokenizer", TOKENIZER, message)
    for token in kept:
        if token["id"] >= num_ids:
            raise _fault(
                "tokenizer_mismatch",
                TOKENIZER,
                f"the added token {shown(token['content'])} has the id {token['id']}, but only "
                f"{num_ids} tokens have embeddings; save the adapter with its embeddings",
            )
    return sorted(kept, key=lambda token: int(token["id"]))


def _check_vocab(own: dict[str, int], of_base: dict[str, int]) -> None:
    differing = [(i, token) for token, i in of_base.items() if own.get(token) != i]
    differing = differing or [(i, token) for token, i in own.items() if token not in of_base]
    if differing:
        _, token = min(differing)
        _refuse_token(token, own.get(token), of_base.get(token))


def _refuse_token(token: str, own_id: int | None, base_id: int | None) -> NoReturn:
    own, of_base = ("no id" if i is None else f"the id {i}" for i in (own_id, base_id))
    raise _fault(
        "tokenizer_mismatch",
        TOKENIZER,
        f"token {shown(token)} has {own}, the base model's {of_base}",
    )


def _check_components(own: _Tokenizer, of_base: _Tokenizer) -> None:
    """Check everything but the tokens. The error names the field that differs."""
    _check_merges(own.definition["model"].get("merges"), of_base.definition["model"].get("merges"))
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        if _steps(own.definition.get(name), name) != _steps(of_base.definition.get(name), name):
            _refuse_component(name)
    if _around(own) != _around(of_base):
        _refuse_component("post_processor")
    options, known = _options(own.definition["model"]), _options(of_base.definition["model"])
    for name in sorted({*options, *known}):
        if options.get(name) != known.get(name):
            _refuse_component(f"model.{name}")


def _check_merges(own: Any, of_base: Any) -> None:
    """Compare merges, which are written as "a b" or as ["a", "b"]."""
    for place, (merge, known) in enumerate(zip_longest(own or (), of_base or ())):
        if merge != known and _pair(merge) != _pair(known):
            _refuse_component(f"model.merges[{place}]")


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


def _steps(component: Json | None, role: str) -> list[Json]:
    """The steps of a component in order, without options that change no id."""
    if component is None:
        return []
    nested = next((component[name] for name in _LISTS if name in component), None)
    if nested is not None:
        return [step for inner in nested for step in _steps(inner, role)]
    step = {n: it for n, it in component.items() if n not in ("trim_offsets", "str_rep")}
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


def _around(tokenizer: _Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that a post-processor puts before and after a text."""
    before: list[int] = []
    after: list[int] = []
    for step in _steps(tokenizer.definition.get("post_processor"), "post_processor"):
        if step["type"] == "TemplateProcessing":
            names = [piece.get("SpecialToken", {}).get("id") for piece in step["single"]]
            ids = [step["special_tokens"][name]["ids"] if name else [] for name in names]
            place = names.index(None)
            before = sum(ids[:place], before)
            after = sum(ids[place:], after)
    return before, after


def _refuse_component(path: str) -> NoReturn:
    raise _fault("tokenizer_mismatch", f"{TOKENIZER}:{path}", "the base model has another")


# ---- the chat template and the tokens that it names ----


def _template(raw: bytes | None, config: Json, base: BaseText) -> str | None:
    """The chat template, if it is another than the base model's."""
    param, template = CHAT_TEMPLATE, None if raw is None else raw.decode()
    if template is None:
        param, template = f"{TOKENIZER_CONFIG}:chat_template", config.get("chat_template")
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default")
    known = base.chat_template or ""
    # Jinja does not read the last line's end.
    if template is None or template.removesuffix("\n") == known.removesuffix("\n"):
        return None
    size_bytes = len(template.encode())
    if size_bytes > MAX_TEMPLATE_BYTES:
        raise TooLarge.of(param, size_bytes, MAX_TEMPLATE_BYTES)
    try:
        ChatTemplate({"default": template}, {})
    except TemplateError as error:
        raise _fault("invalid_chat_template", param, f"it does not parse: {error}") from error
    return str(template)


def _variables(named: Mapping[str, str], template: str | None, base: BaseText) -> dict[str, str]:
    """The special tokens that the template may use and the base model has not."""
    source = template or base.chat_template or ""
    own = {
        name: text
        for name, text in named.items()
        if name in source and text != base.special_tokens.get(name)
    }
    longest = max((len(text.encode()) for text in own.values()), default=0)
    if len(own) > _MAX_VARIABLES or longest > MAX_TOKEN_BYTES:
        message = (
            f"it has over {_MAX_VARIABLES} special tokens, or one over {MAX_TOKEN_BYTES} bytes"
        )
        raise _fault("invalid_tokenizer", TOKENIZER_CONFIG, message)
    return own


def _ends(
    eos: str | None, added: list[Json], base: BaseText, of_base: _Tokenizer | None
) -> list[int]:
    """The id of an end of answers that the base model has not; `added` has it as a special token.

    eos: of the uploaded config. A token that there is not ends nothing.
    """
    if eos is None or eos == base.special_tokens.get("eos_token"):
        return []
    token = next((token for token in added if token["content"] == eos), None)
    if token is None:
        if of_base is None or not (eos in of_base.vocab or eos in of_base.added):
            return []
        token = dict.fromkeys(_FLAGS, False) | {"id": of_base.vocab.get(eos), "content": eos}
        token |= of_base.added.get(eos, {})
        if not token["special"]:
            added.append(token)
    token["special"] = True
    return [token["id"]]


def _fault(code: str, param: str, message: str) -> InvalidAdapter:
    without = f"An upload without {param.partition(':')[0]} has what the base model has"
    return file_fault(code, f"{param}: {message}. {without}", param)
