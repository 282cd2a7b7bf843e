"""Adapters that write calls in a format of their own, beside others in one batch."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.conftest import DEMO
from tests.e2e.stack import Tenant

TENANT = "formats"
TOOLS = [
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "look_up", "parameters": {
        "type": "object", "properties": {"thing": {"type": "string", "maxLength": 8}},
        "required": ["thing"]}}},
]  # fmt: skip
OWN = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": "[hm]", "close": "[/hm]", "content": "text"},
        "tool_calls": {
            "open": "[do]",
            "close": "[/do]",
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.tool}", "arguments": "{content.input}"},
            },
        },
    },
}
FORMATS = {"in-mistral": "mistral", "in-llama": "llama3_json", "in-own": OWN}


@pytest.fixture(scope="module")
def tenant(tenant: Tenant) -> Tenant:
    for name, given in (FORMATS | {"in-bases": None}).items():
        tenant.push(name, DEMO / "adapters" / "json", response_template=given)
    return tenant


def test_a_version_has_the_format_that_its_upload_named(tenant):
    def latest(name):
        return tenant.http.get(f"/v1/adapters/{name}").json()["latest"]

    for name, given in (FORMATS | {"in-bases": None}).items():
        assert latest(name)["response_template"] == given
    # The same files in another format are another version.
    for given, version in [("mistral", 1), (OWN, 2), ("mistral", 1)]:
        tenant.push("in-mistral", DEMO / "adapters" / "json", response_template=given)
        assert latest("in-mistral")["version"] == version


def test_adapters_of_several_formats_call_tools_in_one_batch(client):
    def ask(model):
        return client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "What does a fox eat?"}], n=2,
            tools=TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=1.0,
            logprobs=True,
        )  # fmt: skip

    models = [*FORMATS, "in-bases", "base"]
    with ThreadPoolExecutor(len(models)) as threads:
        answers = dict(zip(models, threads.map(ask, models), strict=True))
    beginnings = {
        "in-mistral": "[TOOL_CALLS]",
        "in-llama": '{"name": "',
        "in-own": ("[do]", "[hm]"),
    }
    for model, answer in answers.items():
        for choice in answer.choices:
            (call,) = choice.message.tool_calls
            assert choice.finish_reason == "tool_calls"
            assert call.function.name in ("now", "look_up")
            assert isinstance(json.loads(call.function.arguments), dict)
            written = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
            assert written.decode().startswith(beginnings.get(model, "<tool_call>"))
    assert answers["in-own"].usage.completion_tokens_details.reasoning_tokens >= 0
    assert answers["base"].usage.completion_tokens_details.reasoning_tokens is None


def test_an_upload_with_a_format_that_is_not_served_is_refused_by_path(tenant):
    files = {"adapter_config.json": {"size_bytes": 1, "sha256": "0" * 64}}
    body = {"files": files, "response_template": OWN | {"start_anchor": 3}}
    answer = tenant.http.post("/v1/adapters/refused/uploads", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_template.start_anchor"
