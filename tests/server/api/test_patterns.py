"""Mistyped values are refused in words, and names that do not exist with those that do."""

from collections.abc import Iterator
from typing import Any

import pytest

from server.api.patterns import WORDS
from server.billing.base_revisions import name_base
from tests.server.in_process import InProcess, product_of_file

product = product_of_file


def refusal(product: InProcess, method: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
    answer = product.operator.call(method, f"/admin/v1/{path}", body)
    return answer.status_code, answer.json()["error"]["message"]


def patterns_in(schema: Any) -> Iterator[str]:
    """Every pattern of a text in an OpenAPI document."""
    if isinstance(schema, dict):
        if isinstance(found := schema.get("pattern"), str):
            yield found
        schema = list(schema.values())
    if isinstance(schema, list):
        for each in schema:
            yield from patterns_in(each)


def test_every_pattern_is_told_in_words(product: InProcess) -> None:
    document = product.operator.call("GET", "/openapi.json").json()
    bodies = {**document["components"]["schemas"], **document["paths"]}
    found = set(patterns_in(bodies))
    assert len(found) > 7
    assert found <= WORDS.keys()
    assert not any(pattern in words for pattern, words in WORDS.items())


def test_an_amount_that_is_none_is_refused_by_a_sentence(product: InProcess) -> None:
    tenant = product.user("acme").name
    path = f"tenants/{tenant}/budgets/monthly/hard"
    status, message = refusal(product, "PUT", path, {"amount": "abc"})
    assert (status, message.startswith("amount: Give dollars")) == (
        400, True,
    )  # fmt: skip
    user = product.user("globex")
    tool = {"type": "function", "function": {"name": "a b"}}
    body = {"model": "base", "messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    error = user.call("POST", "/v1/chat/completions", body).json()["error"]["message"]
    assert error == f"tools[0].function.name: {WORDS['^[A-Za-z0-9_-]{1,64}$']}"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "prices", {"base_model": "typo", "prompt_nanousd": 1}),
        ("PUT", "tenants/{}/limits/typo", {"max_concurrency": 1}),
        ("POST", "billing/simulate", {"book": {"bases": {"typo": {"prompt_nanousd": 1}}}}),
    ],
)
def test_a_base_model_that_does_not_exist_is_refused_with_those_that_do(
    product: InProcess, method: str, path: str, body: dict[str, Any]
) -> None:
    tenant = product.user(f"acme-{path[:3]}").name
    product.gateway.database.write_sync(lambda conn: name_base(conn, "1" * 64, "org/old"))
    status, message = refusal(product, method, path.format(tenant), body)
    assert (status, "no base model 'typo'" in message, "org/old" in message) == (404, True, True)


def test_a_base_model_that_is_still_to_come_has_a_price(product: InProcess) -> None:
    (entry, *_) = product.gateway.bases.entries
    body = {"base_model": entry.name, "prompt_nanousd": 1}
    assert product.operator.call("POST", "/admin/v1/prices", body).status_code == 201
