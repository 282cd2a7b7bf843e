"""Times in milliseconds, and a start that is not before its end, are refused wherever times are."""

import time
from typing import Any

import pytest

from server.accounts.auth import SCOPES
from tests.server.in_process import InProcess, User

NOW_S = int(time.time())
IN_2100 = 4_102_444_800
MILLISECONDS = (NOW_S - 3600) * 1000
NAMES = ("start", "end", "start_time", "end_time")
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/admin/v1/billing/simulate", {"price_version": 1, "start": str(MILLISECONDS)}),
    ("/admin/v1/billing/simulate", {"price_version": 1, "end": str(MILLISECONDS)}),
    ("/admin/v1/tenants/acme/keys", {"expires_at": MILLISECONDS}),
    ("/admin/v1/prices", {"prompt_nanousd": 1, "effective_at": MILLISECONDS}),
    ("/admin/v1/prices", {"prompt_nanousd": 1, "base_model": "base", "until": MILLISECONDS}),
]


@pytest.fixture(scope="module")
def acme(shared_product: InProcess) -> User:
    return shared_product.user("acme", scopes=frozenset(SCOPES))


def refusal(acme: User, path: str, query: str) -> dict[str, Any]:
    """The error of a refused question, which the operator asks of its own paths."""
    user = acme.product.operator if path.startswith("/admin") else acme
    answer = user.call("GET", f"{path}?{query}")
    assert answer.status_code == 400, (path, query, answer.text)
    return answer.json()["error"]


def test_milliseconds_are_refused_by_name_in_every_query(acme: User) -> None:
    document = acme.product.operator.call("GET", "/openapi.json").json()
    taken = [
        (path, parameter["name"])
        for path, methods in document["paths"].items()
        for parameter in methods.get("get", {}).get("parameters", ())
        if parameter["name"] in NAMES
    ]
    assert len(taken) == 16
    for path, name in taken:
        others = "" if name.startswith("start") else f"&start{name.removeprefix('end')}=5"
        error = refusal(acme, path, f"{name}={MILLISECONDS}{others}")
        assert error["param"] == name, path
        assert "Send seconds since 1970, not milliseconds" in error["message"]
        if name.startswith("start"):
            end = name.replace("start", "end")
            for late in (f"{name}={IN_2100}", f"{name}=9&{end}=9", f"{name}=9&{end}=5"):
                error = refusal(acme, path, late)
                assert (error["param"], f"before {end}" in error["message"]) == (name, True)


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_milliseconds_are_refused_by_name_in_a_body(
    acme: User, path: str, body: dict[str, Any]
) -> None:
    answer = acme.product.operator.call("POST", path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, list(body)[-1])
    assert "Send seconds since 1970, not milliseconds" in error["message"]


def test_a_time_that_is_not_over_yet_is_answered_and_one_before_the_default_start_is_refused(
    acme: User,
) -> None:
    assert refusal(acme, "/v1/usage", "end=1970-01-01")["param"] == "start"
    asked = f"/v1/usage?start={NOW_S}&end=9999999999"
    assert acme.call("GET", asked).status_code == 200
