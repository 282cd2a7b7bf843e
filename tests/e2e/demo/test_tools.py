"""Tools over HTTP, on the demo's model and adapters, with OpenAI's client."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import openai

from tests.e2e.conftest import DEMO
from tests.e2e.stack import Stack, Tenant

QUESTION = {"role": "user", "content": "What does the owl eat?"}
LOOK_UP = {
    "type": "object",
    "properties": {
        "animal": {"type": "string", "maxLength": 12},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
    },
    "required": ["animal", "legs"],
}
TOOLS = [
    {"type": "function", "function": {"name": "look_up", "parameters": LOOK_UP, "strict": True}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]


def test_the_prefix_cache_has_the_prompt_of_the_same_tools_in_another_order_of_keys(
    client: openai.OpenAI,
) -> None:
    request = {
        "model": "base", "messages": [{"role": "user", "content": "What is in the cache?"}],
        "tool_choice": "none", "max_tokens": 1,
    }  # fmt: skip
    other = json.loads(json.dumps(TOOLS, sort_keys=True))
    usages = [
        client.chat.completions.create(tools=tools, **request).usage for tools in (TOOLS, other)
    ]
    assert usages[0].prompt_tokens == usages[1].prompt_tokens > 64
    assert usages[1].prompt_tokens_details.cached_tokens >= usages[1].prompt_tokens - 17


def test_the_example_of_the_pages_executes_the_tool_that_the_demo_calls(
    demo_stack: Stack, tenant: Tenant, agent: None, tmp_path: Path
) -> None:
    pages = [(DEMO.parent / page).read_text() for page in ("README.md", "docs/tenant/tools.md")]
    (example,) = {
        re.search(r"```python\n(import json.*?)```", page, re.DOTALL)[1] for page in pages
    }
    keys = {"CHORALE_URL": demo_stack.base_url, "CHORALE_API_KEY": tenant.api_key}
    done = subprocess.run(
        [sys.executable, "-c", example], env=os.environ | keys, cwd=tmp_path, timeout=60,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (said,) = re.findall(r"print\(.*\)  # (.*)", example)
    assert done.stdout == f"{said}\n"
