"""Chats as prompts, rendered by the model's own template: what transformers makes of them.

A template comes with a model, maybe from strangers, and runs in Jinja's sandbox. A request gives it
data only. What bounds a rendering: messages and body are limited at the edge, `range` by the
sandbox, the prompt here; Jinja holds Python's lock no longer at a time than other Python code.
"""

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from server.text.json_object import JsonObject

MAX_PROMPT_CHARACTERS = 16 << 20

_END_MARK = "THE-LAST-MESSAGE-ENDS-HERE"

# What a template's own code may run into, given messages that its author did not think of.
_FAULTS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip


class TemplateError(Exception):
    """The model's chat template does not parse, or refused these messages."""


class ChatTemplate:
    """A model's templates: the default one, and the one for chats with tools.

    sources: name -> Jinja.   special_tokens: `bos_token` and the like, variables of the template;
    those that a model does not have are undefined. Raises TemplateError.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._templates = {
                name: environment.from_string(source)
                for name, source in sources.items()
                if name in ("default", "tool_use")
            }
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"line {error.lineno}: {error.message}") from error
        self._special_tokens = special_tokens
        self._sources = sources

    @classmethod
    def load(cls, model_dir: Path, config: JsonObject) -> "ChatTemplate":
        """Of a model's folder. config: of tokenizer_config.json. Raises TemplateError."""
        return cls(_sources(model_dir, config), _special_tokens(model_dir, config))

    @property
    def description(self) -> dict[str, str]:
        """`bos_token` and the like, and `chat_template` where there is one."""
        default = self._sources.get("default")
        return {**self._special_tokens, **({"chat_template": default} if default else {})}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt, up to where the assistant speaks, or to the last message's end. Raises
        TemplateError.
        """
        default = self._templates.get("default")
        template = self._templates.get("tool_use", default) if tools is not None else default
        if template is None:
            raise TemplateError("This model has no chat template; use /v1/completions.")
        # None is what OpenAI's clients send for "not there"; templates ask whether a key is there.
        given = [{k: v for k, v in message.items() if v is not None} for message in messages]
        pieces = template.generate(
            messages=given,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._special_tokens,
        )
        try:
            return _joined(pieces)
        except _FAULTS as error:
            reason = f"The model's chat template refused these messages: {error}"
            raise TemplateError(reason) from error

    def render_open(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt up to the end of the last message's text, for an answer that continues it.

        As transformers does it (`continue_final_message`): by a mark behind the text, which shows
        where the template puts it. Raises TemplateError.
        """
        *before, last = messages
        marked = dict(last) | {"content": f"{last['content']}{_END_MARK} "}
        text = self.render([*before, marked], add_generation_prompt=False)
        rendered, mark, after = text.rpartition(_END_MARK)
        if not mark or _END_MARK in rendered or last["content"].strip() not in text:
            raise TemplateError("The model's chat template changes the last message's text.")
        # A template that trims what follows trims the text as well.
        return rendered if after.startswith(" ") else rendered.rstrip()


def content(token: Any) -> str | None:
    """A special token's text; older files wrap it in an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def read_json(path: Path) -> Any:
    """An empty object where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _joined(pieces: Iterable[str]) -> str:
    parts, size = [], 0
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size > MAX_PROMPT_CHARACTERS:
            raise ValueError(f"the prompt is longer than {MAX_PROMPT_CHARACTERS} characters")
    return "".join(parts)


# ---- where a model keeps it ----


def _sources(model_dir: Path, config: JsonObject) -> dict[str, str]:
    """Name -> template. Files of their own win over tokenizer_config.json, as in transformers."""
    files = {path.stem: path for path in model_dir.glob("additional_chat_templates/*.jinja")}
    if (model_dir / "chat_template.jinja").exists():
        files["default"] = model_dir / "chat_template.jinja"
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    found = config.get("chat_template")
    if found is None:
        # Where models with a processor had it before transformers 4.49.
        found = read_json(model_dir / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        return {entry["name"]: entry["template"] for entry in found}
    return {"default": found} if isinstance(found, str) else {}


def _special_tokens(model_dir: Path, config: JsonObject) -> dict[str, str]:
    """`bos_token`, `eos_token` and every other `..._token` that has a text."""
    named = dict(config)
    if "added_tokens_decoder" not in config:
        named |= read_json(model_dir / "special_tokens_map.json")
    extra = named.get("extra_special_tokens")
    named |= extra if isinstance(extra, dict) else {}
    texts = {name: content(token) for name, token in named.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


# ---- the language that templates are written in ----


def _environment() -> jinja2.Environment:
    """Jinja as transformers sets it up: filters, functions, tags and how blanks are trimmed."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "namespace": _TemplateNamespace,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant says, for training; here it is only text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _TemplateNamespace(Namespace):
    """No names that begin with an underscore: by those the sandbox judges what is safe."""

    def __init__(*args: Any, **attributes: Any) -> None:
        self, *given = args
        attributes = dict(*given, **attributes)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, it leaves characters as they are: a prompt is no HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
