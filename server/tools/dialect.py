"""How one model is told of tools, and how it writes calls and reasoning."""

import hashlib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import from_json

from registry.errors import Invalid
from server.text.json_object import JsonObject
from server.text.template_variables import TemplateVariable, granted
from server.text.tokenizer import TemplateError, Tokenizer
from server.tools.built_in import BUILT_IN
from server.tools.parser import AnswerParser, Parsed
from server.tools.response_template import ResponseTemplate, read_template
from server.tools.writing import as_text, with_teaching_in_question

logger = logging.getLogger(__name__)

_ID = "probe0001"
"""An id that Mistral's templates accept: they want nine letters or digits."""
_PROBE_CALL = {"id": _ID, "type": "function", "function": {"name": "probe", "arguments": {"x": 1}}}
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probe",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
_QUESTION = {"role": "user", "content": "question"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """A model's way with tools.

    template: how it writes.   is_native: its chat template knows tools, and writes calls in the
    same way; if not, tools are taught by the prompt.   token_ids: marks that are tokens.
    """

    template: ResponseTemplate
    is_native: bool
    token_ids: Mapping[str, int]

    @classmethod
    def of_base(cls, tokenizer: Tokenizer) -> "Dialect":
        """The dialect of a base model: as its tokenizer describes it, or else a built-in one that
        its chat template was seen to write, or else Hermes', taught by the prompt.
        """
        described = _described(tokenizer)
        candidates = _candidates(described)
        native = next((it for it in candidates if _writes(tokenizer, it)), None)
        chosen = native or candidates[0]
        if described is None and not _reasons(tokenizer, chosen):
            chosen = replace(chosen, reasoning=None)
        how = "its chat template" if native else "the prompt"
        logger.info("tools are taught by %s", how)
        return cls(chosen, native is not None, _token_ids(tokenizer, chosen))

    def of_adapter(self, tokenizer: Tokenizer, template: ResponseTemplate) -> "Dialect":
        """The dialect of an adapter that writes in its own way, on a base of this dialect."""
        if template.calls == self.template.calls:
            return replace(self, template=template, token_ids=_token_ids(tokenizer, template))
        return Dialect(template, False, _token_ids(tokenizer, template))

    def prompt(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[JsonObject],
        variables: Sequence[TemplateVariable] = (),
        *,
        begins: bool,
        continues: bool,
    ) -> str:
        """The rendered chat. Raises TemplateError; Invalid for variables that are not read."""
        calls, template = self.template.calls, tokenizer.chat_template
        given = [dict(message) for message in messages]

        def render(
            messages: Sequence[Mapping[str, Any]], tools: Sequence[JsonObject] | None = None
        ) -> str:
            names = template.variables(for_tools=bool(tools)) if variables else ()
            values = granted(variables, names, reasons=self.template.reasoning is not None)
            if continues:
                return template.render_open(messages, tools or None, variables=values)
            return template.render(
                messages, tools or None, add_generation_prompt=begins, variables=values
            )

        has_calls = any("tool_calls" in m or m["role"] == "tool" for m in given)
        if calls is None or not (tools or has_calls):
            return render(given)
        if self.is_native:
            return render([self._with_short_ids(_with_parsed_arguments(m)) for m in given], tools)
        given = as_text(given, tools, calls)
        try:
            return render(given)
        except TemplateError:
            # Some templates have no system message, in which the tools are told.
            if not tools or [message["role"] for message in given[:2]] != ["system", "user"]:
                raise
            return render(with_teaching_in_question(given))

    def _with_short_ids(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with ids of calls as Mistral's templates want them."""
        calls = self.template.calls
        if calls is None or not (calls.id_key or calls.name_end):
            return message
        message = dict(message)
        if "tool_call_id" in message:
            message["tool_call_id"] = _short(message["tool_call_id"])
        if message.get("tool_calls"):
            message["tool_calls"] = [
                call | {"id": _short(call["id"])} for call in message["tool_calls"]
            ]
        return message


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of calls as objects, as transformers gives them."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        try:
            # json.loads would let half a surrogate pair and any depth through.
            parsed = from_json(function["arguments"])
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            function["arguments"] = parsed
        calls.append(call | {"function": function})
    return message | {"tool_calls": calls}


def _short(call_id: str) -> str:
    if re.fullmatch("[A-Za-z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


# ---- what a model's files say ----


def _described(tokenizer: Tokenizer) -> ResponseTemplate | None:
    """The template in tokenizer_config.json, if there is one that is served."""
    if tokenizer.response_template is None:
        return None
    try:
        return read_template(tokenizer.response_template)
    except Invalid as error:
        logger.warning("the model's response_template is not used: %s", error)
        return None


def _candidates(described: ResponseTemplate | None) -> list[ResponseTemplate]:
    """Formats that the model may have, first the one that is taught if it has none of them."""
    if described is None:
        return list(BUILT_IN.values())
    if described.calls is not None:
        return [described]
    # The files tell of reasoning only, behind which a call needs a mark.
    regions = [template.calls for template in BUILT_IN.values()]
    return [replace(described, calls=it) for it in regions if it and not it.is_unopened]


def _writes(tokenizer: Tokenizer, template: ResponseTemplate) -> bool:
    """Whether the chat template tells of tools, and writes a call so that it is parsed again."""
    call = {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]}
    result = {"role": "tool", "tool_call_id": _ID, "name": "probe", "content": "result"}
    render = tokenizer.chat_template.render
    try:
        asked = render([_QUESTION], [_PROBE_TOOL])
        called = render([_QUESTION, call], [_PROBE_TOOL], add_generation_prompt=False)
        answered = render([_QUESTION, call, result], [_PROBE_TOOL])
    except TemplateError:
        return False
    if "probe" not in asked or "result" not in answered:
        return False
    answer = called[len(os.path.commonprefix([asked, called])) :]
    parsed = Parsed()
    parser = AnswerParser(template, ["probe"])
    parsed.append(parser.push(answer, final=True))
    return len(parsed.calls) == 1 and parsed.calls[0].arguments == '{"x": 1}'


def _reasons(tokenizer: Tokenizer, template: ResponseTemplate) -> bool:
    """Whether the model's files know the mark that opens its reasoning."""
    opens = template.reasoning.opens if template.reasoning else ()
    source = tokenizer.chat_template.default or ""
    return any(mark in tokenizer.added_tokens or mark in source for mark in opens)


def _token_ids(tokenizer: Tokenizer, template: ResponseTemplate) -> dict[str, int]:
    known = tokenizer.added_tokens
    return {mark: known[mark] for mark in sorted(template.marks) if mark in known}
