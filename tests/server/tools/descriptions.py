"""Descriptions of the built-in formats, in transformers' form."""

from typing import Any

_TEXT = {"content": "text"}
_MISTRAL = ["[/INST]", "[/TOOL_RESULTS]"]


def _calls(function: Any, **fields: Any) -> dict[str, Any]:
    transform = {"type": "function", "function": function, **fields.pop("others", {})}
    return {"content": "json", "transform": transform, **fields}


def _keys(name: str, arguments: str) -> dict[str, str]:
    return {"name": f"{{{name}}}", "arguments": f"{{{arguments}}}"}


DESCRIPTIONS: dict[str, dict[str, Any]] = {
    "hermes": {"start_anchor": "<|im_start|>assistant\n", "fields": {
        "thinking": _TEXT | {"open": "<think>", "close": "</think>"},
        "tool_calls": _calls("{content}", open="<tool_call>", close="</tool_call>", repeats=True),
        "content": _TEXT,
    }},
    "llama3_json": {
        "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "fields": {"content": _TEXT, "tool_calls": _calls(
            _keys("content.name", "content.parameters"), repeats=True,
            open_pattern=r'\A(?:<\|python_tag\|>)?(?=\{"name": ")',
        )},
    },
    "mistral": {"start_anchor": _MISTRAL, "fields": {"content": _TEXT, "tool_calls": _calls(
        _keys("name", "arguments"), others={"id": "{id}"}, open="[TOOL_CALLS]", transform_each=True,
    )}},
    "mistral_v11": {"start_anchor": _MISTRAL, "fields": {
        "thinking": _TEXT | {"open": "[THINK]", "close": "[/THINK]"},
        "tool_calls": _calls(
            _keys("name", "content"), repeats=True,
            open_pattern=r"\[TOOL_CALLS\](?P<name>[\w-]+)\[ARGS\]",
        ),
        "content": _TEXT,
    }},
}  # fmt: skip
