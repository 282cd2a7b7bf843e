"""How a model writes reasoning and tool calls, in transformers' form (`response_template`).

Parser and grammar are made from the same ResponseTemplate, so what is enforced is what is parsed.
Marks are literals, never a stranger's regular expression: `open_pattern` has two known forms.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from registry.errors import Invalid
from server.text.json_object import JsonObject

MAX_BYTES = 8 << 10
"""Longest description, as JSON."""
_MAX_MARKS = 8
_MAX_MARK_CHARACTERS = 64
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names that models' templates have for the field of reasoning."""
_LITERAL = r"(?:\\[^\w\s]|[^\\.*+?()\[\]{}|^$])+"
_NAME = r"\(\?P<name>(?:\\w\+|\[\\w-\]\+|\[\\w\.-\]\+|\[\^\\?[\[{<]\]\+)\)"
_NAMED = re.compile(rf"({_LITERAL}){_NAME}({_LITERAL})")
"""A call whose name stands between two marks; its body is the arguments."""
_UNOPENED = re.compile(rf"\\A(?:\(\?:({_LITERAL})\)\?)?\(\?=({_LITERAL})\)")
"""A call without a mark: the answer is one if it begins as one, maybe after an optional mark."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of an answer between marks.   closes: none where it goes on to the answer's end."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallRegion(Region):
    """A part with tool calls, each written `{"name": "f", "arguments": {...}}`.

    name_key, arguments_key, id_key: the names of the object's members; id_key is None where calls
    have no ids.
    is_list: the part is a JSON list of calls.   repeats: there may be several parts.
    name_end: the mark between a name and its arguments, where calls are no objects but
    `open name name_end {...}`.
    is_unopened: an answer that begins with a call has no other content; `opens` may precede it.
    """

    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str | None = None
    is_list: bool = False
    repeats: bool = False
    name_end: str | None = None
    is_unopened: bool = False

    @property
    def beginning(self) -> str:
        """The text that a call's object begins with."""
        return f'{{"{self.name_key}": "'


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """The description of a model's answers.

    anchors: texts of a prompt behind which the assistant's turn begins.   reasoning, calls: None
    for a model that writes none.
    """

    anchors: tuple[str, ...]
    reasoning: Region | None
    calls: CallRegion | None

    @property
    def marks(self) -> frozenset[str]:
        """Texts that may be special tokens of the model."""
        named = self.calls.name_end if self.calls else None
        regions = [region for region in (self.reasoning, self.calls) if region]
        found = {mark for region in regions for mark in (*region.opens, *region.closes)}
        return frozenset(found | ({named} if named else set()))

    def is_reasoning(self, prompt: str) -> bool:
        """Whether the prompt ends within a reasoning part of the assistant's turn."""
        if self.reasoning is None:
            return False
        ends = [prompt.rfind(anchor) + len(anchor) for anchor in self.anchors if anchor in prompt]
        if not ends:
            return prompt.rstrip().endswith(self.reasoning.opens)
        begun = prompt[max(ends) :]
        last_open = max(begun.rfind(mark) for mark in self.reasoning.opens)
        return last_open > max(begun.rfind(mark) for mark in self.reasoning.closes)


PLAIN = ResponseTemplate((), None, None)
"""Answers without reasoning and calls."""


def read_template(spec: Any, param: str = "response_template") -> ResponseTemplate:
    """The template that a description gives. Raises Invalid with the path at fault."""
    if len(json.dumps(spec)) > MAX_BYTES:
        raise Invalid.at(param, f"it may have {MAX_BYTES} bytes at most")
    _check_keys(spec, param, {"version", "defaults", "fields", "start_anchor"})
    if spec.get("version", 1) != 1:
        raise Invalid.at(f"{param}.version", "only version 1 is served")
    fields = spec.get("fields")
    known = {"content", "tool_calls", *_REASONING}
    _check_keys(fields, f"{param}.fields", known)
    if "content" in fields:
        # Its mark of the end is the end of the model's turn, which ends the answer anyway.
        _check_keys(fields["content"], f"{param}.fields.content", {"close", "content", "optional"})
    reasoning = [name for name in _REASONING if name in fields]
    if len(reasoning) > 1:
        raise Invalid.at(f"{param}.fields.{reasoning[1]}", f"{reasoning[0]} is another name for it")
    path = f"{param}.fields."
    calls = _calls(fields["tool_calls"], f"{path}tool_calls") if "tool_calls" in fields else None
    if reasoning and calls and calls.is_unopened:
        raise Invalid.at(f"{path}{reasoning[0]}", "calls behind it need a mark that opens them")
    return ResponseTemplate(
        anchors=_marks(spec, "start_anchor", param),
        reasoning=_region(fields[reasoning[0]], path + reasoning[0]) if reasoning else None,
        calls=calls,
    )


def _region(field: Any, path: str) -> Region:
    _check_keys(field, path, {"open", "close", "content", "repeats", "join", "optional"})
    if field.get("content", "text") != "text":
        raise Invalid.at(f"{path}.content", "reasoning is served as text only")
    return Region(_marks(field, "open", path), _marks(field, "close", path))


def _calls(field: Any, path: str) -> CallRegion:
    known = {"open", "open_pattern", "close", "content", "repeats", "optional"}
    _check_keys(field, path, known | {"transform", "transform_each"})
    if field.get("content") != "json":
        raise Invalid.at(f"{path}.content", "tool calls are served as json only")
    closes = _marks(field, "close", path) if "close" in field else ()
    form = _function(field, path)
    form |= {
        "is_list": field.get("transform_each") is True,
        "repeats": field.get("repeats") is True,
    }
    if "open_pattern" not in field:
        return CallRegion(_marks(field, "open", path), closes, **form)
    pattern = str(field["open_pattern"])
    if (found := _NAMED.fullmatch(pattern)) and form["name_key"] == "{name}":
        opening, name_end = map(_unescaped, found.groups())
        return CallRegion((opening,), closes, name_end=name_end, repeats=form["repeats"])
    if (found := _UNOPENED.fullmatch(pattern)) and not closes and not form["is_list"]:
        before, begin = found.groups()
        # An answer begins once, whatever `repeats` is: in transformers it makes a list of calls.
        form |= {"is_unopened": True, "repeats": False}
        region = CallRegion((_unescaped(before),) if before else (), (), **form)
        if _unescaped(begin) == region.beginning:
            return region
    raise Invalid.at(
        f"{path}.open_pattern",
        r'it must be MARK(?P<name>\w+)MARK or \A(?=\{"name": "), with literal marks; or use open',
    )


def _function(field: JsonObject, path: str) -> dict[str, Any]:
    """The members of a call's object, from the transform that makes OpenAI's form of it."""
    path += ".transform"
    transform = field.get("transform", {})
    _check_keys(transform, path, {"type", "id", "function"})
    prefix = "" if field.get("transform_each") is True else "content."
    function = transform.get("function")
    if function == "{content}":
        return {"name_key": "name"}
    _check_keys(function, f"{path}.function", {"name", "arguments"})
    if function == {"name": "{name}", "arguments": "{content}"} and prefix:
        return {"name_key": "{name}"}
    members = {"name_key": function.get("name"), "arguments_key": function.get("arguments")}
    members |= {"id_key": transform["id"]} if "id" in transform else {}
    for member, value in members.items():
        found = re.fullmatch(r"\{" + re.escape(prefix) + r"(\w{1,64})\}", str(value))
        if not found:
            raise Invalid.at(path, f"it must name a member for each value, as in {{{prefix}name}}")
        members[member] = found[1]
    return members


def _marks(holder: Mapping[str, Any], key: str, path: str) -> tuple[str, ...]:
    given = holder.get(key)
    marks = [given] if isinstance(given, str) else given
    if not isinstance(marks, list) or not 0 < len(marks) <= _MAX_MARKS:
        raise Invalid.at(
            f"{path}.{key}", f"it must be a text, or a list of 1 to {_MAX_MARKS} texts"
        )
    for mark in marks:
        is_text = isinstance(mark, str) and mark.strip() and mark.replace("\n", "").isprintable()
        if not is_text or len(mark) > _MAX_MARK_CHARACTERS:
            raise Invalid.at(
                f"{path}.{key}",
                f"a mark has 1 to {_MAX_MARK_CHARACTERS} printable characters, not all blank",
            )
    return tuple(marks)


def _check_keys(value: Any, path: str, known: set[str]) -> None:
    if not isinstance(value, dict):
        raise Invalid.at(path, "it must be an object")
    for key in value:
        if key not in known:
            raise Invalid.at(f"{path}.{key[:64]}", "it is not served; leave it out")


def _unescaped(literal: str) -> str:
    return re.sub(r"\\(.)", r"\1", literal)
