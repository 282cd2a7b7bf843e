"""Cached tokens as users see them: in usage, on the bill, and never across tenants."""

from typing import Any

from tests.e2e.oracle import TinyWorld
from tests.e2e.stack import Tenant
from tests.e2e.tiny.conftest import PUBLIC_PROMPT

PROMPT = [7 + i % 90 for i in range(100)]


def usage(tenant: Tenant, model: str, prompt: list[int], **options: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0, **options}
    answer = tenant.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


def cached(found: dict[str, Any]) -> int:
    return found["prompt_tokens_details"]["cached_tokens"]


def test_a_prompt_that_comes_again_is_cached_and_costs_less(tiny: TinyWorld) -> None:
    first = usage(tiny.tenant, "beta", PROMPT)
    again = usage(tiny.tenant, "beta", PROMPT)
    assert (cached(first), cached(again)) == (0, 96)
    assert first["prompt_tokens"] == again["prompt_tokens"] == 100
    # A cached token has half the price by default: 150 - 75 nano-dollars.
    assert first["x_chorale"]["cost_nanousd"] - again["x_chorale"]["cost_nanousd"] == 96 * 75
    assert cached(usage(tiny.tenant, "alpha", PROMPT)) == 0
    assert cached(usage(tiny.tenant, "base", PROMPT)) == 0


def test_another_tenant_finds_nothing_of_it(tiny: TinyWorld) -> None:
    prompt = PROMPT[::-1]
    stranger = tiny.stack.tenant("stranger")
    assert cached(usage(tiny.tenant, "base", prompt)) == 0
    assert cached(usage(tiny.tenant, "base", prompt)) == 96
    assert cached(usage(stranger, "base", prompt)) == 0


def test_a_public_prompt_is_shared_by_all_tenants_on_the_base_model(tiny: TinyWorld) -> None:
    found = []
    for name in ("first-fox", "second-fox"):
        tenant = tiny.stack.tenant(name)
        messages = [
            {"role": "system", "content": PUBLIC_PROMPT},
            {"role": "user", "content": f"I am {name}, who are you?"},
        ]
        body = {"model": "base", "messages": messages, "max_tokens": 2}
        found.append(cached(tenant.http.post("/v1/chat/completions", json=body).json()["usage"]))
    assert found[0] == 0
    assert found[1] >= 16
