"""Answers with tool calls and reasoning as a grammar, by the rules of `server.tools.parser`.

    auto      text, and behind the mark that opens a call nothing but a call of a declared tool
    required  calls only, behind a reasoning part if the model writes one
    none      no calls; then only the constraint of what follows the reasoning is enforced

The grammar is in llguidance's form of Lark.
"""

import functools
import hashlib
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.grammar.limits import TOOLS
from registry.errors import Invalid
from server.constraints.compiled import Grammar
from server.constraints.constraint import Constraint
from server.constraints.grammar import (
    checked_schema,
    compiled,
    enforceable_schema,
    flaw_of,
    words_for,
)
from server.constraints.schema import LISTS
from server.text.json_object import JsonObject
from server.tools.response_template import CallRegion, ResponseTemplate
from server.tools.tool import Tool, ToolUse

_MOST_COMPILE_S = 2.0
"""Processor time for all tools of a request."""
_MOST_SEARCH_S = 1.0
"""The part of it in which the parts of schemas are sought that cannot be enforced."""
_MOST_PATHS = 20
_MOST_CHARACTERS = 256
"""Limits of what an answer says of the parts of schemas that are not enforced."""
_TELLING_OF_PROPERTIES = {
    "additionalProperties", "patternProperties", *LISTS, "$ref", "$dynamicRef", "$recursiveRef",
    "if", "then", "else", "dependentSchemas", "dependencies", "unevaluatedProperties",
}  # fmt: skip
"""Keywords beside `properties` that may declare arguments."""
_TERMINALS = r"""
TEXT: /(.|\n)+/
ANY: /(.|\n)*/
BLANK: /[ \n]/
GAP: /[ \n]{1,4}/
ID: /[A-Za-z0-9_-]{1,64}/
"""


@dataclass(frozen=True)
class AnswerForm:
    """Everything that an answer must comply with.

    constraint: of the content.   token_ids: marks of the template that are tokens of the model.
    is_reasoning: the prompt ends within a reasoning part.
    """

    template: ResponseTemplate
    use: ToolUse | None
    constraint: Constraint | None
    token_ids: Mapping[str, int]
    is_reasoning: bool = False

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        return self.use.callable_tools if self.use and self.template.calls else ()

    @property
    def demands(self) -> bool:
        """Whether there is anything to enforce."""
        return bool(self.tools or self.constraint)

    @property
    def size_bytes(self) -> int:
        """The bytes of what has to be compiled."""
        tools = self.use.size_bytes if self.use and self.tools else 0
        return tools + (len(self.constraint.text) if self.constraint else 0)

    @functools.cached_property
    def digest(self) -> bytes:
        if not self._is_wrapped:
            assert self.constraint is not None
            return self.constraint.digest
        tools = self.use.digest if self.use else b""
        parts = self.template, tools, self.constraint, sorted(self.token_ids.items())
        return hashlib.sha256(repr((*parts, self.is_reasoning)).encode()).digest()

    def compiled(self) -> Grammar:
        """The grammar for the engine. Raises Invalid that names the path at fault."""
        if not self._is_wrapped:
            assert self.constraint is not None
            return Grammar(compiled(self.constraint))
        content = json.loads(compiled(self.constraint))["grammars"] if self.constraint else []
        schemas, not_enforced = _schemas(self.tools)
        # The check knows no tokens of the model, so it is made on the marks' texts.
        if flaw := flaw_of(self._grammar(schemas, content, {})):
            raise Invalid(f"tools: {words_for(flaw)}.", param="tools")
        return Grammar(self._grammar(schemas, content, self.token_ids), _shortened(not_enforced))

    @property
    def _is_wrapped(self) -> bool:
        """Whether anything but the constraint's content may be in an answer."""
        return bool(self.tools or self.template.reasoning)

    def _grammar(
        self, schemas: Sequence[JsonObject], content: list[JsonObject], token_ids: Mapping[str, int]
    ) -> str:
        rules = _Rules(self, schemas, token_ids)
        is_free = not content and (self.use is None or self.use.mode == "auto")
        start = rules.free() if is_free else rules.bound()
        lark = "\n".join([f"start: {start}", *rules.lines]) + _TERMINALS
        named = [{**grammar, "name": "content"} for grammar in content]
        return json.dumps({"grammars": [{"name": TOOLS, "lark_grammar": lark}, *named]})


class _Rules:
    """The rules of a form's grammar.   lines: all but the first rule.   schemas: of the tools."""

    def __init__(
        self, form: AnswerForm, schemas: Sequence[JsonObject], token_ids: Mapping[str, int]
    ) -> None:
        self.lines: list[str] = []
        self._form = form
        self._token_ids = token_ids
        self._is_single = form.use is not None and not form.use.is_parallel
        template = form.template
        self._calls = template.calls if form.tools else None
        self._schemas = schemas
        self._reasoning = template.reasoning
        self._thought_end = ""
        if self._reasoning:
            self._thought_end = self._rule(self._until(self._reasoning.closes))

    def free(self) -> str:
        """Text, in which marks open calls and reasoning."""
        calls = self._calls
        assert calls is not None
        if calls.is_unopened:
            return self._free_or_one_call(calls)
        region = self._rule(f"{self._until(calls.opens)} {self._region(calls)}")
        first, thought = "", ""
        if self._reasoning:
            thought = self._rule(f"{self._until(self._reasoning.opens)} {self._thought_end}")
            first = self._thought_end if self._form.is_reasoning else ""
        if calls.repeats and not self._is_single:
            return f"{first} ({region}{thought and ' | '}{thought})* TEXT?"
        thoughts = thought and f"{thought}*"
        return f"{first} {thoughts} ({region} {thoughts})? TEXT?"

    def bound(self) -> str:
        """Nothing but calls or content of the given constraint, behind the reasoning."""
        first = ""
        if self._reasoning:
            first = f"{self._thought_end} GAP?"
            if not self._form.is_reasoning:
                first = f"({self._one_of(self._reasoning.opens)} {first})?"
        calls, use = self._calls, self._form.use
        if calls is None or use is None:
            return f"{first} @content"
        opening = self._one_of(calls.opens) if calls.opens else ""
        region = self._rule(
            f"{opening}{'?' if calls.is_unopened and opening else ''} {self._region(calls)}"
        )
        several = region
        if calls.repeats and not self._is_single:
            several = f"{region} (GAP? {region})*"
        if use.mode == "required":
            return f"{first} {several}"
        if calls.is_unopened:
            raise Invalid(
                "response_format: this model writes calls as JSON without a mark, which nothing "
                "tells from other JSON; leave out response_format or tools.",
                param="response_format",
            )
        return f"{first} ({several} | @content)"

    def _free_or_one_call(self, calls: CallRegion) -> str:
        """Text that does not begin as a call, or a call alone."""
        begin = calls.beginning
        heads = [self._lazy(_literal(mark + begin)) for mark in (*calls.opens, "")]
        heads += [f"<[{i}]> {_literal(begin)}" for i in self._ids(calls.opens)]
        others = "|".join(re.escape(mark + begin) for mark in (*calls.opens, ""))
        others = others.replace("/", "\\/")
        self.lines.append(f"OTHER: /(.|\\n)*/ & ~/({others})(.|\\n)*/")
        return f"({' | '.join(heads)}) {self._any_call(calls, begin)} | OTHER"

    def _region(self, calls: CallRegion) -> str:
        """A region behind its opening mark."""
        call = self._any_call(calls)
        if calls.is_list:
            more = "" if self._is_single else f'(BLANK? "," BLANK? {call})*'
            call = f'"[" BLANK? {call} {more} BLANK? "]"'
        close = f"BLANK? {self._one_of(calls.closes)}" if calls.closes else ""
        return f"BLANK? {call} {close}"

    def _any_call(self, calls: CallRegion, begun: str = "") -> str:
        """A call of any of the tools.   begun: its text so far."""
        named = zip(self._form.tools, self._schemas, strict=True)
        texts = [self._call(calls, tool.name, json.dumps(it), begun) for tool, it in named]
        return self._rule(" | ".join(map(self._rule, texts)))

    def _call(self, calls: CallRegion, name: str, schema: str, begun: str) -> str:
        if calls.name_end is not None:
            heads = [_literal(name + calls.name_end)]
            heads += [f"{_literal(name)} <[{i}]>" for i in self._ids([calls.name_end])]
            return f"({' | '.join(heads)}) BLANK? %json {schema}"
        head = f'{calls.beginning}{name}", "{calls.arguments_key}": '.removeprefix(begun)
        call_id = rf'(", \"{calls.id_key}\": \"" ID "\"")? ' if calls.id_key else ""
        return f'{_literal(head)} %json {schema} {call_id}"}}"'

    # ---- marks: as text, and as tokens of the model ----

    def _one_of(self, marks: Sequence[str]) -> str:
        tokens = [f"<[{i}]>" for i in self._ids(marks)]
        return f"({' | '.join([*map(_literal, marks), *tokens])})"

    def _until(self, marks: Sequence[str]) -> str:
        """Text up to the first of the marks, with it."""
        heads = [self._lazy(f"ANY {_literal(mark)}") for mark in marks]
        heads += [f"TEXT? <[{i}]>" for i in self._ids(marks)]
        return f"({' | '.join(heads)})"

    def _ids(self, marks: Iterable[str]) -> list[int]:
        return [self._token_ids[mark] for mark in marks if mark in self._token_ids]

    def _rule(self, text: str) -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}: {text}")
        return name

    def _lazy(self, text: str) -> str:
        """A rule that ends as soon as it matches."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}[lazy]: {text}")
        return name


def _literal(text: str) -> str:
    """A text in Lark's quotes."""
    return json.dumps(text, ensure_ascii=False)


def _schemas(tools: Sequence[Tool]) -> tuple[list[JsonObject], list[str]]:
    """The arguments' schemas in llguidance's form, and the paths of what they lack; or Invalid."""
    began = time.thread_time()
    schemas, not_enforced = [], []
    for tool in tools:
        if time.thread_time() > began + _MOST_COMPILE_S:
            raise Invalid.at(tool.param, "these tools take too long to compile")
        schema, left_out = _arguments(tool, began + _MOST_SEARCH_S)
        schemas.append(schema)
        not_enforced += left_out
    return schemas, not_enforced


def _arguments(tool: Tool, search_ends: float) -> tuple[JsonObject, list[str]]:
    """The schema of the arguments that a tool declares, and the paths of what it lacks; or Invalid
    if the tool is strict.
    """
    asked = {"type": "object", **(tool.parameters or {})}
    param = f"{tool.param}.function.parameters"
    declared, required = asked.get("properties"), asked.get("required")
    names = set(map(str, required if isinstance(required, list) else ()))
    is_told = names <= set(declared if isinstance(declared, dict) else ())
    if is_told and asked.keys().isdisjoint(_TELLING_OF_PROPERTIES):
        asked["additionalProperties"] = False
    if tool.strict:
        return checked_schema(asked, param), []
    return enforceable_schema(asked, param, search_ends)


def _shortened(paths: Sequence[str]) -> tuple[str, ...]:
    """The first of the paths, cut, and how many more there are."""
    shown = [path[:_MOST_CHARACTERS] for path in paths[:_MOST_PATHS]]
    num_more = len(paths) - len(shown)
    return (*shown, *([f"and {num_more} more"] if num_more else []))
