"""Tools over HTTP, on the demo's model and adapters, with OpenAI's client."""

import json
import os
import re
import subprocess
import sys

import jsonschema_rs
import openai
import pytest

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
NAMED = {"type": "function", "function": {"name": "look_up"}}


def check_call(call) -> None:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "look_up":
        jsonschema_rs.validate(LOOK_UP, arguments)
    else:
        assert (call.function.name, arguments) == ("now", {})


@pytest.mark.parametrize("model", ["base", "json", "shout"])
def test_required_and_named_tools_are_called(client, model) -> None:
    for choice in ("required", NAMED):
        answer = client.chat.completions.create(
            model=model, messages=[QUESTION], temperature=1.0, seed=5, n=4, tools=TOOLS,
            tool_choice=choice, parallel_tool_calls=False,
        )  # fmt: skip
        ids = set()
        for each in answer.choices:
            assert each.finish_reason == "tool_calls"
            assert each.message.content is None
            (call,) = each.message.tool_calls
            check_call(call)
            ids.add(call.id)
            assert choice == "required" or call.function.name == "look_up"
        assert len(ids) == 4


def test_a_stream_adds_up_to_the_whole_answer(client) -> None:
    request = {
        "model": "base", "messages": [QUESTION], "temperature": 0.8, "seed": 3, "tools": TOOLS,
        "tool_choice": "required", "parallel_tool_calls": False,
    }  # fmt: skip
    whole = client.chat.completions.create(**request)
    (call,) = whole.choices[0].message.tool_calls
    *chunks, last = client.chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    )
    deltas = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert {part.index for part in deltas} == {0}
    assert [part.id is not None for part in deltas] == [True] + [False] * (len(deltas) - 1)
    assert deltas[0].function.name == call.function.name
    assert "".join(part.function.arguments for part in deltas) == call.function.arguments
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_a_conversation_goes_on_with_the_results_of_its_tools(client) -> None:
    messages = [{"role": "system", "content": "Be brief."}, QUESTION]
    for _ in range(2):
        answer = client.chat.completions.create(
            model="base",
            messages=messages,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            check_call(call)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "mice"})
    # The model would rather go on with calls, which is why they are forbidden here.
    answer = client.chat.completions.create(
        model="base", messages=messages, tools=TOOLS, tool_choice="none", max_tokens=20
    )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


def test_automatic_answers_call_declared_tools_or_say_something(client, agent: None) -> None:
    """The adapter was trained to call look_up, which has another name here."""
    text = {"type": "string"}
    schema = {"type": "object", "properties": {"thing": text, "fact": text}}
    schema["required"] = ["thing", "fact"]
    told = {"name": "find_out", "description": "Look a fact up.", "parameters": schema}
    tools = [{"type": "function", "function": told}]
    num_calls = 0
    for seed in range(3):
        answer = client.chat.completions.create(
            model="agent", messages=[QUESTION], tools=tools, temperature=1.0, seed=seed, n=8,
            max_tokens=60,
        )  # fmt: skip
        for choice in answer.choices:
            assert choice.message.content or choice.message.tool_calls
            for call in choice.message.tool_calls or ():
                assert call.function.name == "find_out"
                jsonschema_rs.validate(schema, json.loads(call.function.arguments))
                num_calls += 1
    assert num_calls


def test_a_call_that_max_tokens_cuts_is_no_call(client) -> None:
    answer = client.chat.completions.create(
        model="base", messages=[QUESTION], tools=TOOLS, tool_choice=NAMED, max_tokens=25
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert choice.message.content.startswith("<tool_call>")
    assert '{"name": "look_up"' in choice.message.content


def test_an_answer_has_calls_or_the_shape_that_was_asked_for(client) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": LOOK_UP}}
    answer = client.chat.completions.create(
        model="json", messages=[QUESTION], tools=TOOLS, response_format=shape, n=4, seed=1
    )
    for choice in answer.choices:
        for call in choice.message.tool_calls or ():
            check_call(call)
        if not choice.message.tool_calls:
            jsonschema_rs.validate(LOOK_UP, json.loads(choice.message.content))


def in_reverse(value):
    """The same JSON with its keys in the opposite order."""
    if isinstance(value, dict):
        return {key: in_reverse(value[key]) for key in reversed(value)}
    return [in_reverse(inner) for inner in value] if isinstance(value, list) else value


def test_the_prefix_cache_has_the_prompt_of_the_same_tools_in_any_order_of_keys(client) -> None:
    request = {
        "model": "base", "messages": [{"role": "user", "content": "What is in the cache?"}],
        "tool_choice": "none", "max_tokens": 1,
    }  # fmt: skip
    usages = [
        client.chat.completions.create(tools=tools, **request).usage
        for tools in (TOOLS, in_reverse(TOOLS))
    ]
    assert usages[0].prompt_tokens == usages[1].prompt_tokens > 64
    assert usages[1].prompt_tokens_details.cached_tokens >= usages[1].prompt_tokens - 17


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice.function.name"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {
            "name": "x", "strict": True,
            "parameters": {"properties": {"a": {"not": {}}}}}}]},
         "tools[0].function.parameters.properties.a.not"),
        ({"tools": [{"type": "function", "function": {
            "name": "x", "parameters": {"type": "string"}}}]},
         "tools[0].function.parameters.type"),
        ({"messages": [QUESTION, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [QUESTION, {"role": "assistant"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [
            {"id": "1", "function": {"name": "f", "arguments": "{}"}}]}]},
         "messages[0].tool_calls"),
    ],
)  # fmt: skip
def test_a_wrong_tool_is_named_by_its_path(client, change, param) -> None:
    request = {"model": "base", "messages": [QUESTION], "tools": TOOLS} | change
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**request)
    assert error.value.param == param


def test_a_tool_whose_schema_cannot_be_enforced_gets_any_arguments(client) -> None:
    odd = {"properties": {"a": {"not": {}}}, "type": "object"}
    tools = [{"type": "function", "function": {"name": "odd", "parameters": odd}}]
    answer = client.chat.completions.create(
        model="json", messages=[QUESTION], tools=tools, tool_choice="required", max_tokens=400,
        parallel_tool_calls=False, temperature=1.0, seed=2,
    )  # fmt: skip
    for call in answer.choices[0].message.tool_calls or ():
        assert isinstance(json.loads(call.function.arguments), dict)


@pytest.fixture(scope="module")
def agent(tenant: Tenant):
    """Serve the adapter that calls a tool; the tests of the page count the others."""
    tenant.push("agent", DEMO / "adapters" / "agent")
    yield
    tenant.adapters.remove("agent")
    tenant.http.delete("/v1/adapters/agent").raise_for_status()


@pytest.mark.parametrize("page", ["README.md", "docs/tenant/tools.md"])
def test_the_example_of_the_pages_executes_the_tool_that_the_demo_calls(
    page, demo_stack: Stack, tenant: Tenant, agent: None, tmp_path
) -> None:
    root = DEMO.parent
    (example,) = re.findall(r"```python\n(import json.*?)```", (root / page).read_text(), re.DOTALL)
    keys = {"CHORALE_URL": demo_stack.base_url, "CHORALE_API_KEY": tenant.api_key}
    done = subprocess.run(
        [sys.executable, "-c", example], env=os.environ | keys, cwd=tmp_path, timeout=60,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (said,) = re.findall(r"print\(.*\)  # (.*)", example)
    assert done.stdout == f"{said}\n"
