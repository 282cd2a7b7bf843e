"""Calls of random tools: every complete one is valid, on the demo and on SmolLM2, hot and cold."""

import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import jsonschema_rs
import pytest

from tests import needs
from tests.e2e.stack import Stack, Tenant, running

WORDS = ("fox", "owl", "den", "set", "get", "find", "now", "x_1", "place", "list-all", "9to5")


def make_value(chance: random.Random, depth: int = 0) -> dict:
    """A schema of a value that a small model ends soon."""
    kind = chance.choice(["text", "number", "flag", "choice", "list", "object"][: 6 - 2 * depth])
    if kind == "text":
        return {"type": "string", "maxLength": chance.randint(1, 8)}
    if kind == "number":
        low = chance.randint(-5, 5)
        return {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 900)}
    if kind == "flag":
        return {"type": ["boolean", "null"]}
    if kind == "choice":
        return {"enum": chance.sample(["red", 'a "b"', 3, None, "é"], 3)}
    if kind == "list":
        return {"type": "array", "items": make_value(chance, depth + 1), "maxItems": 2}
    return make_object(chance, depth + 1)


def make_object(chance: random.Random, depth: int = 0) -> dict:
    names = chance.sample(WORDS, chance.randint(0, 3))
    properties = {name: make_value(chance, depth) for name in names}
    required = chance.sample(names, chance.randint(0, len(names)))
    return {"type": "object", "properties": properties, "required": required,
            "additionalProperties": False}  # fmt: skip


def make_tools(chance: random.Random) -> dict[str, dict]:
    """Parameters by the name of a tool."""
    return {name: make_object(chance) for name in chance.sample(WORDS, chance.randint(1, 3))}


def ask(tenant: Tenant, model: str, number: int, max_tokens: int) -> Counter:
    """Ask for an answer with random tools; how it ended. Each call must be valid, or cut."""
    chance = random.Random(number)
    tools = make_tools(chance)
    named = chance.choice(sorted(tools))
    choice = chance.choice(["auto", "required", {"type": "function", "function": {"name": named}}])
    # Each request has its own connection: a kept one may end while another thread uses it.
    answer = httpx.post(
        f"{tenant.stack.base_url}/v1/chat/completions",
        headers=tenant.headers,
        trust_env=False,
        json={
            "model": model,
            "messages": [{"role": "user", "content": f"Please call {named} for a fox."}],
            "tools": [
                {"type": "function", "function": {"name": name, "parameters": parameters}}
                for name, parameters in tools.items()
            ],
            "tool_choice": choice,
            "parallel_tool_calls": chance.random() < 0.3,
            "temperature": chance.choice([0, 0.7, 1.5]),
            "seed": number,
            "max_tokens": max_tokens,
        },
        timeout=300,
    )
    assert answer.status_code == 200, answer.text
    (one,) = answer.json()["choices"]
    calls = one["message"].get("tool_calls", [])
    assert "<tool_call>" not in (one["message"]["content"] or "")
    for call in calls[: len(calls) - (one["finish_reason"] == "length")]:
        jsonschema_rs.validate(
            tools[call["function"]["name"]], json.loads(call["function"]["arguments"])
        )
    if choice != "auto" and one["finish_reason"] != "length":
        assert one["finish_reason"] == "tool_calls"
        assert calls
        assert isinstance(choice, str) or [call["function"]["name"] for call in calls] == [named]
    kind = "auto" if choice == "auto" else "bound"
    return Counter({f"{kind} {one['finish_reason']}": 1, "calls": len(calls)})


def ask_many(stack: Stack, model: str, numbers: range, max_tokens: int) -> Counter:
    tenant = stack.tenants[0]
    with ThreadPoolExecutor(8) as threads:
        asked = threads.map(lambda n: ask(tenant, model, n, max_tokens), numbers)
        return sum(asked, Counter())


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("demo", range(40)),
        pytest.param("demo", range(1000, 1200), marks=pytest.mark.soak),
        pytest.param("smollm2", range(1000, 1200), marks=pytest.mark.soak),
    ],
)
def test_every_call_of_random_tools_is_valid(
    name: str, numbers: range, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """`pytest -s` shows how the answers ended."""
    if name == "demo":
        ended = ask_many(request.getfixturevalue("demo_stack"), "base", numbers, 150)
    else:
        with running(tmp_path, needs.smollm2()) as stack:
            stack.tenant("acme")
            ended = ask_many(stack, "base", numbers, 120)
    print(name, dict(ended))  # noqa: T201
    times = 3 if name == "demo" else 1
    assert ended["bound tool_calls"] > times * ended["bound length"]
