"""The proof of a description: a fixed answer in its format is read back, and may be given."""

import json

from registry.errors import Invalid
from server.constraints.grammar import accepts
from server.text.json_object import JsonObject
from server.tools.built_in import BUILT_IN
from server.tools.grammar import AnswerForm
from server.tools.parser import AnswerParser, Parsed
from server.tools.response_template import ResponseTemplate, read_template
from server.tools.tool import Tool, ToolUse
from server.tools.writing import written_calls

_CALLS = (("look_up", '{"text": "Ä \\"x\\" \\\\ {[<", "n": [1, -2.5]}'), ("now", "{}"))
_ANYTHING = {"type": "object", "additionalProperties": True}
_TOOLS = tuple(Tool(name, None, _ANYTHING, True, "tools") for name, _ in _CALLS)


def checked_template(given: str | JsonObject, param: str) -> str:
    """The name of a built-in format, or a description that proves itself, as JSON. Raises Invalid.

    given: as an upload has it.
    """
    if isinstance(given, str):
        named(given, param)
    else:
        _prove(read_template(given, param), param)
    return json.dumps(given, sort_keys=True)


def named(name: str, param: str) -> ResponseTemplate:
    """The built-in format of this name. Raises Invalid."""
    if name not in BUILT_IN:
        names = ", ".join(sorted(BUILT_IN))
        raise Invalid.at(param, f"the formats are {names}; or send a description")
    return BUILT_IN[name]


def stored_template(text: str) -> ResponseTemplate:
    """The template that `checked_template` wrote."""
    given = json.loads(text)
    return named(given, "name") if isinstance(given, str) else read_template(given)


def _prove(template: ResponseTemplate, param: str) -> None:
    if template.calls is None:
        raise Invalid(f"{param}.fields.tool_calls: Field required", param=f"{param}.fields")
    is_single = not (template.calls.is_list or template.calls.repeats)
    calls = _CALLS[: 1 if is_single else 2]
    text = written_calls(template.calls, calls)
    if template.reasoning:
        text = f"{template.reasoning.opens[0]}Hm, 1 < 2.{template.reasoning.closes[0]}\n{text}"
    whole, parser = Parsed(), AnswerParser(template, [tool.name for tool in _TOOLS])
    for character in text:
        whole.append(parser.push(character))
    whole.append(parser.push("", final=True))
    found = [(call.name, call.arguments) for call in whole.calls]
    if whole.content or found != list(calls) or not parser.is_whole:
        raise Invalid(
            f"{param}: its marks cannot be told apart: the answer {text!r} is not read back.",
            param=param,
        )
    use = ToolUse(_TOOLS, "auto", tuple(tool.name for tool in _TOOLS))
    grammar = AnswerForm(template, use, None, {}).compiled().text
    if not accepts(grammar, text):
        raise Invalid.at(param, f"the answer {text!r} cannot be enforced")
