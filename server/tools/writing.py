"""Tool calls as a model writes them, and tools taught by a prompt.

Models whose chat template knows tools need none of this. The others are told of the tools in the
system message, and see their own calls and the results as text.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from server.text.json_object import JsonObject
from server.tools.response_template import CallRegion

_RESULT = "<tool_response>\n{}\n</tool_response>"


def written_calls(region: CallRegion, calls: Iterable[tuple[str, str]]) -> str:
    """Calls as text.   calls: name and arguments of each, the arguments as JSON."""
    opening, closing = (marks[0] if marks else "" for marks in (region.opens, region.closes))
    if region.is_unopened:
        opening = ""
    if region.name_end is not None:
        return "".join(f"{opening}{name}{region.name_end}{it}{closing}" for name, it in calls)
    objects = [f'{region.beginning}{name}", "{region.arguments_key}": {it}}}' for name, it in calls]
    if region.is_list:
        objects = [f"[{', '.join(objects)}]"]
    line_end = "\n" if closing else ""
    return "\n".join(f"{opening}{line_end}{one}{line_end}{closing}" for one in objects)


def as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[JsonObject], region: CallRegion
) -> list[dict[str, Any]]:
    """The messages for a template that knows no tools: calls and results become text."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            text = _RESULT.format(message["content"])
            if plain and plain[-1].pop("is_result", False):
                text = f"{plain.pop()['content']}\n{text}"
            plain.append({"role": "user", "content": text, "is_result": True})
        elif calls := message.get("tool_calls"):
            functions = [call["function"] for call in calls]
            written = written_calls(region, ((f["name"], _json(f["arguments"])) for f in functions))
            said = message.get("content")
            plain.append(
                {"role": "assistant", "content": f"{said}\n{written}" if said else written}
            )
        else:
            plain.append(dict(message))
    for message in plain:
        message.pop("is_result", None)
    return _taught(plain, teaching(tools, region)) if tools else plain


def teaching(tools: Sequence[JsonObject], region: CallRegion) -> str:
    """The text that tells a model of its tools."""
    declared = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = written_calls(region, [("NAME", "{ARGUMENTS}")])
    return (
        f"You can call tools. Each line describes one, as JSON:\n{declared}\n\n"
        "To call a tool, write its name and its arguments like this, once for each call:\n"
        f"{example}\n\nThe results come back between <tool_response> and </tool_response>."
    )


def with_teaching_in_question(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the system message as a part of the first question, for templates that
    have no system message.
    """
    system, first, *others = messages
    text = f"{system['content']}\n\n{first['content']}"
    return [dict(first) | {"content": text}, *map(dict, others)]


def _taught(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [first | {"content": f"{first['content']}\n\n{text}"}, *messages[1:]]


def _json(arguments: Any) -> str:
    is_text = isinstance(arguments, str)
    return arguments if is_text else json.dumps(arguments, ensure_ascii=False)
