"""Descriptions of the formats of well-known models, in transformers' form."""

from server.text.json_object import JsonObject
from server.tools.response_template import ResponseTemplate, read_template

_THINKING = {"open": "<think>", "close": "</think>", "content": "text"}
_FUNCTION = {"type": "function", "function": "{content}"}

DESCRIPTIONS: dict[str, JsonObject] = {
    # Hermes 2 and 3, Qwen 2.5 and 3, SmolLM 3: an object between tags for each call.
    "hermes": {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": _THINKING,
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": _FUNCTION,
            },
            "content": {"content": "text"},
        },
    },
    # Llama 3.1 to 3.3: an answer that is one object; the model makes one call at a time.
    "llama3_json": {
        "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r'\A(?:<\|python_tag\|>)?(?=\{"name": ")',
                "repeats": True,
                "content": "json",
                "transform": {
                    "type": "function",
                    "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
                },
            },
            "content": {"content": "text"},
        },
    },
    # Mistral 7B v0.3, Nemo, Large 2407, Small 2409 and 2501: a list after a special token.
    "mistral": {
        "start_anchor": ["[/INST]", "[/TOOL_RESULTS]"],
        "fields": {
            "tool_calls": {
                "open": "[TOOL_CALLS]",
                "content": "json",
                "transform_each": True,
                "transform": {
                    "type": "function",
                    "id": "{id}",
                    "function": {"name": "{name}", "arguments": "{arguments}"},
                },
            },
            "content": {"content": "text"},
        },
    },
    # Mistral since Small 3.1 and Magistral: name and arguments after special tokens.
    "mistral_v11": {
        "start_anchor": ["[/INST]", "[/TOOL_RESULTS]"],
        "fields": {
            "thinking": {"open": "[THINK]", "close": "[/THINK]", "content": "text"},
            "tool_calls": {
                "open_pattern": r"\[TOOL_CALLS\](?P<name>[\w-]+)\[ARGS\]",
                "repeats": True,
                "content": "json",
                "transform": {
                    "type": "function",
                    "function": {"name": "{name}", "arguments": "{content}"},
                },
            },
            "content": {"content": "text"},
        },
    },
}

BUILT_IN: dict[str, ResponseTemplate] = {
    name: read_template(spec, name) for name, spec in DESCRIPTIONS.items()
}
