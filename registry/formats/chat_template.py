"""Chats as prompts, rendered by the model's own template, with the same result as in transformers.

A template comes with a model, maybe from strangers, and runs in Jinja's sandbox. A request gives it
data only. A rendering is bounded: messages and body at the edge, `range` by the sandbox, the prompt
here; and Jinja holds Python's lock no longer at a time than other Python code.
"""

import copy
import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_PROMPT_CHARACTERS = 16 << 20

_END_MARK = "THE-LAST-MESSAGE-ENDS-HERE"
_GIVEN = ("messages", "tools", "documents", "add_generation_prompt")
_PROBE = "A-MESSAGE-HAS-THIS-TEXT"

# Errors of a template's own code on messages that its author did not think of.
_FAULTS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip


class TemplateError(Exception):
    """The model's chat template does not parse, or refused these messages."""


class ChatTemplate:
    """A model's templates: the default one, and the one for chats with tools.

    sources: name -> Jinja.   special_tokens: `bos_token` and the like, variables of the template;
    tokens that a model does not have are undefined in it. Raises TemplateError.
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
        except (RecursionError, SyntaxError) as error:
            raise TemplateError("it is nested too deeply") from error
        self.special_tokens = special_tokens
        self.sources = sources
        self._of_parts: dict[str, bool] = {}
        self._variables: dict[str, frozenset[str]] = {}

    def with_special_tokens(self, special_tokens: Mapping[str, str]) -> "ChatTemplate":
        """The same templates, with other variables."""
        made = copy.copy(self)
        made.special_tokens = special_tokens
        return made

    @classmethod
    def load(cls, model_dir: Path, config: dict[str, Any]) -> "ChatTemplate":
        """Templates in a model's folder. config: tokenizer_config.json. Raises TemplateError."""
        return cls(_sources(model_dir, config), special_tokens(_with_map(model_dir, config)))

    @property
    def description(self) -> dict[str, str]:
        """The special tokens, `bos_token` and the like, and `chat_template` if there is one."""
        shown = {"chat_template": self.default} if self.default else {}
        return {**self.special_tokens, **shown}

    @property
    def default(self) -> str | None:
        """The template of an ordinary chat."""
        return self.sources.get("default")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt up to the start of the assistant's turn, or up to the last message's end.
        Raises TemplateError.

        variables: more names and their values for the template, out of `variables`.
        """
        name = self._name(for_tools=tools is not None)
        template = self._templates[name]
        # OpenAI's clients send None for a missing value; templates test whether the key exists.
        given = [{k: v for k, v in message.items() if v is not None} for message in messages]
        if name not in self._of_parts:
            # Not before the first chat: to load a template must not run it.
            self._of_parts[name] = self._reads_parts(template)
        if self._of_parts[name]:
            given = [_in_parts(message) for message in given]
        try:
            return self._prompt(template, given, tools, add_generation_prompt, variables)
        except _FAULTS as error:
            reason = f"The model's chat template refused these messages: {error}"
            raise TemplateError(reason) from error

    def variables(self, *, for_tools: bool) -> frozenset[str]:
        """Names that a template reads beside what it is given here. Raises TemplateError.

        for_tools: the template is that of chats with tools.
        """
        name = self._name(for_tools=for_tools)
        if name not in self._variables:
            environment = _environment()
            read = meta.find_undeclared_variables(environment.parse(self.sources[name]))
            given = {*_GIVEN, *environment.globals}
            self._variables[name] = frozenset(
                each for each in read - given if not each.endswith("_token")
            )
        return self._variables[name]

    def _name(self, *, for_tools: bool) -> str:
        """The name of the template of a chat. Raises TemplateError if there is none."""
        name = "tool_use" if for_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise TemplateError("This model has no chat template; use /v1/completions.")
        return name

    def _prompt(
        self,
        template: jinja2.Template,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        given = dict(zip(_GIVEN, (messages, tools, None, add_generation_prompt), strict=True))
        pieces = template.generate({**variables, **self.special_tokens, **given})
        return _joined(pieces)

    def _reads_parts(self, template: jinja2.Template) -> bool:
        """Whether it shows a text only as a content part, as templates for images may."""
        message = {"role": "user", "content": _PROBE}
        return not self._shows(template, message) and self._shows(template, _in_parts(message))

    def _shows(self, template: jinja2.Template, message: Mapping[str, Any]) -> bool:
        try:
            return _PROBE in self._prompt(template, [message], None, True)
        except _FAULTS:
            return False

    def render_open(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt up to the end of the last message's text, for an answer that continues it.

        The method is that of transformers (`continue_final_message`): a mark after the text shows
        where the template puts it. Raises TemplateError.
        """
        *before, last = messages
        marked = dict(last) | {"content": f"{last['content']}{_END_MARK} "}
        given = [*before, marked]
        text = self.render(given, tools, add_generation_prompt=False, variables=variables)
        rendered, mark, after = text.rpartition(_END_MARK)
        if not mark or _END_MARK in rendered or last["content"].strip() not in text:
            raise TemplateError("The model's chat template changes the last message's text.")
        # Where the mark's space was trimmed, the template trims the text as well.
        return rendered if after.startswith(" ") else rendered.rstrip()


def content(token: Any) -> str | None:
    """A special token's text; older files wrap the text in an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def read_json(path: Path) -> Any:
    """The JSON object in a file; an empty one if there is no file. Raises ValueError, by name."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object; put the model's own file there.")
    return found


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose text is its one content part."""
    text = message.get("content")
    is_text = isinstance(text, str)
    return {**message, **({"content": [{"type": "text", "text": text}]} if is_text else {})}


def _joined(pieces: Iterable[str]) -> str:
    texts, size = [], 0
    for piece in pieces:
        texts.append(piece)
        size += len(piece)
        if size > MAX_PROMPT_CHARACTERS:
            raise ValueError(f"the prompt is longer than {MAX_PROMPT_CHARACTERS} characters")
    return "".join(texts)


# ---- the files of a model ----


def _sources(model_dir: Path, config: dict[str, Any]) -> dict[str, str]:
    """Name -> template. Separate files win over tokenizer_config.json, as in transformers."""
    files = {path.stem: path for path in model_dir.glob("additional_chat_templates/*.jinja")}
    if (model_dir / "chat_template.jinja").exists():
        files["default"] = model_dir / "chat_template.jinja"
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    found = config.get("chat_template")
    if found is None:
        # Models with a processor kept it here before transformers 4.49.
        found = read_json(model_dir / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        return {entry["name"]: entry["template"] for entry in found}
    return {"default": found} if isinstance(found, str) else {}


def special_tokens(named: Mapping[str, Any]) -> dict[str, str]:
    """The texts of `bos_token`, `eos_token` and every other `..._token` that has one.

    named: of tokenizer_config.json.
    """
    extra = named.get("extra_special_tokens")
    named = {**named, **(extra if isinstance(extra, dict) else {})}
    texts = {name: content(token) for name, token in named.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def _with_map(model_dir: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The config, with the special tokens that older models keep in a file of their own."""
    if "added_tokens_decoder" in config:
        return config
    named: dict[str, Any] = config | read_json(model_dir / "special_tokens_map.json")
    return named


# ---- the language that templates are written in ----


def _environment() -> jinja2.Environment:
    """Jinja as transformers sets it up: filters, functions, tags and trimming of blanks."""
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
    """Reads `{% generation %}`, which marks the assistant's text for training, as plain text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _TemplateNamespace(Namespace):
    """Refuses names that begin with an underscore: the sandbox judges what is safe by them."""

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
    """JSON with characters left as they are, unlike Jinja's own, since a prompt is no HTML."""
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
