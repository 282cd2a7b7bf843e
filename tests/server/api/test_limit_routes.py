"""Limits of tenants, keys and adapters over HTTP, and the answer of GET /v1/limits."""

import asyncio
from dataclasses import replace
from typing import Any, get_args

import pytest

from engine.wire.delivery import Take
from engine.wire.messages import AddRequest, LeaseLow
from server.accounts.auth import SCOPES
from server.billing.base_revisions import name_base
from server.billing.holds import get_hold
from server.database.database import LedgerUnavailable
from server.inference.limit_refusals import RefusingLimit
from server.inference.token_leases import TokenLeases
from server.limits.amounts import Amounts
from server.limits.base_limits import MAX_BASES, set_base_limits
from server.limits.learned import FIRST_GUESS
from server.pool.running import Running, RunningRequest
from tests.registry.rows import add_version
from tests.server.factories import NOW_MS, limit_budget, make_price
from tests.server.fake_engines import FakeEngines
from tests.server.in_process import InProcess, User, still_product, with_engines

product = still_product


def user_of(product: InProcess, *, key: dict[str, Any] | None = None, **limits: Any) -> User:
    """A tenant with these limits. key: the limits of its key."""
    user = product.user(**(key or {}))
    if limits:
        path = f"/admin/v1/tenants/{user.name}"
        assert product.operator.call("PATCH", path, limits).status_code == 200
    return user


def with_adapter(user: User, name: str = "pirate", **limits: int) -> User:
    database = user.product.gateway.database
    base = user.product.gateway.bases.default.model.base_revision
    database.write_sync(lambda c: add_version(c, user.tenant_id, name, base_revision=base))
    if limits:
        assert user.call("PUT", f"/v1/adapters/{name}/limits", limits).status_code == 200
    return user


def limits_of(user: User) -> dict[tuple[str, str], dict[str, Any]]:
    answer = user.call("GET", "/v1/limits")
    assert answer.status_code == 200, answer.text
    return {(limit["metric"], limit["scope"]): limit for limit in answer.json()["data"]}


def test_a_tenant_a_key_and_an_adapter_are_limited_each_for_itself(product: InProcess) -> None:
    user = user_of(
        product, requests_per_minute=9, tokens_per_minute=900, key={"requests_per_minute": 5}
    )
    with_adapter(user, requests_per_minute=2)
    answers = [user.complete("pirate") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[2].headers["x-ratelimit-scope"] == "requests;adapter"
    assert [user.complete("base").status_code for _ in range(4)] == [200, 200, 200, 429]
    limits = limits_of(user)
    assert limits["requests", "adapter"]["id"] == "pirate"
    assert limits["requests", "adapter"]["remaining"] == 0
    assert limits["requests", "key"]["remaining"] == 0
    assert limits["requests", "tenant"]["remaining"] == 4, "refused requests do not count"
    used = sum(answer.json()["usage"]["total_tokens"] for answer in answers[:2]) // 2 * 5
    assert limits["tokens", "tenant"]["used"] == used


def test_every_tenant_that_may_use_an_adapter_is_under_its_limit(product: InProcess) -> None:
    owner = with_adapter(user_of(product), requests_per_minute=2)
    guest = user_of(product)
    assert owner.call("PUT", f"/v1/adapters/pirate/grants/{guest.name}").status_code == 200
    assert guest.call("PUT", f"/v1/offers/{owner.name}/pirate").status_code == 200
    assert owner.complete("pirate").status_code == 200
    assert guest.complete(f"{owner.name}/pirate").status_code == 200
    refused = guest.complete(f"{owner.name}/pirate")
    assert (refused.status_code, refused.headers["x-ratelimit-scope"]) == (429, "requests;adapter")
    assert limits_of(guest) == {}, "only the owner sees an adapter's limits"


def test_limits_of_an_adapter_are_set_as_a_whole_and_read_back(product: InProcess) -> None:
    user = with_adapter(user_of(product), requests_per_minute=2, max_concurrency=7)
    path = "/v1/adapters/pirate/limits"
    read = user.call("GET", path).json()
    assert (read["requests_per_minute"], read["max_concurrency"]) == (2, 7)
    assert user.call("PUT", path, {"tokens_per_minute": 10}).status_code == 200
    assert user.call("GET", path).json()["requests_per_minute"] is None
    assert user.call("PUT", path, {"requests_per_minute": 0}).status_code == 400
    assert user.call("PUT", path, {"requests_per_hour": 1}).status_code == 400
    assert user.call("GET", "/v1/adapters/nobodys/limits").status_code == 404


def test_a_tenant_is_limited_on_a_base_model_and_all_its_adapters_together(
    product: InProcess,
) -> None:
    user, other = with_adapter(user_of(product, requests_per_minute=9)), user_of(product)
    product.gateway.database.write_sync(lambda conn: name_base(conn, "1" * 64, "org/large"))
    path = f"/admin/v1/tenants/{user.name}/limits"
    body = {"requests_per_minute": 2, "tokens_per_minute": 900}
    set_ = product.operator.call("PUT", f"{path}/base", body)
    assert (set_.status_code, set_.json()["base_model"]) == (200, "base")
    limit = {"requests_per_minute": 1}
    assert product.operator.call("PUT", f"{path}/org/large", limit).status_code == 200
    answers = [user.complete(model) for model in ("pirate", "base", "pirate", "base")]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
    for refused in answers[2:]:
        assert refused.headers["x-ratelimit-scope"] == "requests;base"
        assert "on this base model" in refused.json()["error"]["message"]
    assert other.complete("base").status_code == 200
    shown = user.call("GET", "/v1/limits").json()["data"]
    used = sum(answer.json()["usage"]["total_tokens"] for answer in answers[:2])
    assert [(it["metric"], it["id"], it["used"]) for it in shown if it["scope"] == "base"] == [
        ("requests", "base", 2), ("tokens", "base", used), ("requests", "org/large", 0),
    ]  # fmt: skip
    assert product.operator.call("PUT", f"{path}/base", {}).status_code == 200
    assert user.complete("base").status_code == 200, "without limits it is served at once"


def test_limits_on_base_models_are_set_as_a_whole_and_read_back(product: InProcess) -> None:
    user, operator = user_of(product), product.operator
    product.gateway.database.write_sync(lambda conn: name_base(conn, "1" * 64, "org/large"))
    path = f"/admin/v1/tenants/{user.name}/limits"
    operator.call("PUT", f"{path}/org/large", {"max_concurrency": 3, "tokens_per_minute": 5})
    changed = operator.call("PUT", f"{path}/org/large", {"requests_per_minute": 7}).json()
    assert operator.call("GET", f"{path}/org/large").json() == changed
    assert (changed["requests_per_minute"], changed["max_concurrency"]) == (7, None)
    assert operator.call("GET", path).json()["data"] == [changed]
    logged = operator.call("GET", f"/admin/v1/audit-log?tenant={user.name}").json()["data"][0]
    assert (logged["action"], logged["target"]) == ("tenant.base_limits", "org/large")
    operator.call("PUT", f"{path}/org/large", {})
    assert operator.call("GET", path).json()["data"] == []
    assert operator.call("GET", f"{path}/org/large").json()["requests_per_minute"] is None
    for name, body in (("base", {"max_concurrency": 0}), ("base", {"x": 1}), ("b" * 257, {})):
        refused = operator.call("PUT", f"{path}/{name}", body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == next(iter(body), "base_model")
    assert operator.call("PUT", "/admin/v1/tenants/nobody/limits/base", {}).status_code == 404


def test_a_tenant_has_limits_on_a_limited_number_of_base_models(product: InProcess) -> None:
    user = user_of(product)
    database, amounts = product.gateway.database, Amounts(max_concurrency=1)

    def fill(conn: Any) -> None:
        name_base(conn, "7" * 64, "b7")
        for number in range(MAX_BASES):
            set_base_limits(
                conn, user.tenant_id, f"b{number}", amounts, now_ms=NOW_MS, actor="operator"
            )

    database.write_sync(fill)
    path = f"/admin/v1/tenants/{user.name}/limits"
    one_more = product.operator.call("PUT", f"{path}/base", {"max_concurrency": 1})
    assert (one_more.status_code, one_more.json()["error"]["param"]) == (409, "base_model")
    assert product.operator.call("PUT", f"{path}/b7", {"max_concurrency": 2}).status_code == 200
    assert product.operator.call("PUT", f"{path}/one-more", {}).status_code == 200


def test_limits_on_a_base_model_cost_its_requests_no_query(
    product: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, database = [], product.gateway.database
    monkeypatch.setattr(
        type(database), "read",
        lambda self, fn, _read=type(database).read: reads.append(fn) or _read(self, fn),
    )  # fmt: skip
    user = user_of(product)
    path = f"/admin/v1/tenants/{user.name}/limits/base"
    assert product.operator.call("PUT", path, {"requests_per_minute": 9}).status_code == 200
    counts = []
    for _ in range(5):
        reads.clear()
        assert user.complete("base").headers["x-ratelimit-limit-requests"] == "9"
        counts.append(len(reads))
    assert counts[0] > 0, "the identity and the price are read once"
    # What was read may expire between two requests, but not between all of them.
    assert min(counts) == 0


def test_a_hold_names_the_base_model_of_an_adapter(product: InProcess) -> None:
    user = with_adapter(user_of(product))
    assert user.complete("pirate").status_code == 200
    request_id = product.engines.asked[-1].request_id
    hold = product.gateway.database.read_sync(lambda c: get_hold(c, request_id))
    assert hold
    assert (hold.model, hold.base_model) == ("pirate", "base")


def test_a_limit_says_which_request_holds_it_and_when_it_lets_go(product: InProcess) -> None:
    user = user_of(product, max_concurrency=2, tokens_per_minute=100)
    gateway = product.gateway
    identity = asyncio.run(gateway.identities.of(user.api_key))
    asyncio.run(gateway.limiter.acquire("r1", identity.limits, tokens=40, lifetime_ms=125_000))
    limits = limits_of(user)
    seats, tokens = limits["concurrency", "tenant"], limits["tokens", "tenant"]
    assert (seats["used"], seats["remaining"], seats["window_s"]) == (1, 1, None)
    assert seats["held_by"] == [{"request_id": "r1", "units": 1, "frees_in_s": 125.0}]
    assert tokens["held_by"] == [{"request_id": "r1", "units": 40, "frees_in_s": 125.0}]
    assert (tokens["used"], tokens["reset_s"], tokens["window_s"]) == (40, 24.0, 60)


def test_a_key_sees_and_is_refused_by_the_limit_of_the_key_that_made_it(product: InProcess) -> None:
    maker = user_of(product, key={"requests_per_minute": 3, "scopes": SCOPES})
    made = maker.call("POST", "/v1/keys", {"requests_per_minute": 2}).json()
    child = replace(maker, api_key=made["api_key"])
    assert [user.complete("base").status_code for user in (child, maker, maker)] == [200] * 3
    refused = child.complete("base")
    assert (refused.status_code, refused.headers["x-ratelimit-scope"]) == (429, "requests;key")
    limits = child.call("GET", "/v1/limits").json()["data"]
    assert [(limit["id"], limit["limit"], limit["remaining"]) for limit in limits] == [
        (made["key_id"], 2, 1),
        (made["created_by"], 3, 0),
    ]


def test_refusals_are_counted_by_the_kind_of_limit(product: InProcess) -> None:
    def counted() -> dict[str, float]:
        metric = product.gateway.metrics.refusals
        return {limit: metric.labels(limit)._value.get() for limit in get_args(RefusingLimit)}

    before = counted()
    user = user_of(product, requests_per_minute=1)
    assert [user.complete("base").status_code for _ in range(3)] == [200, 429, 429]
    poor = user_of(product)
    limit_budget(product.gateway.database, poor.tenant_id, 1)
    assert poor.complete("base").status_code == 429
    rises = {limit: count - before[limit] for limit, count in counted().items()}
    kinds = {"requests_per_minute": 2, "budget": 1}
    assert rises == dict.fromkeys(get_args(RefusingLimit), 0) | kinds


def test_a_refused_budget_charges_no_limit(product: InProcess) -> None:
    user = user_of(product, requests_per_minute=5)
    limit_budget(product.gateway.database, user.tenant_id, 1)
    refused = user.complete("base")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert refused.headers["x-should-retry"] == "false"
    assert "retry-after" not in refused.headers
    [budget] = user.call("GET", "/v1/budgets").json()["data"]
    assert (budget["status"], budget["remaining_nanousd"]) == ("enforcing", 1)
    assert limits_of(user)["requests", "tenant"]["used"] == 0
    assert not product.gateway.bases.default.running


def test_a_budget_that_is_set_or_removed_holds_from_the_next_request_on(
    product: InProcess,
) -> None:
    user = user_of(product)
    path = f"/admin/v1/tenants/{user.name}/budgets/monthly/hard"
    assert user.complete("base").status_code == 200
    for method, body, status in (("PUT", {"amount": "0"}, 429), ("DELETE", None, 200)):
        assert product.operator.call(method, path, body).status_code == 200
        assert user.complete("base").status_code == status
    changes = {"monthly_budget": "0"}
    assert product.operator.call("PATCH", f"/admin/v1/tenants/{user.name}", changes).is_success
    assert user.complete("base").status_code == 429


def test_who_would_wait_too_long_or_comes_too_late_is_refused_before_anything_is_charged(
    product: InProcess,
) -> None:
    user = user_of(product, requests_per_minute=5, max_queue_share=0.001)
    load = product.gateway.bases.default.load
    waiting = RunningRequest("r1", user.tenant_id, 1, 9, is_cold=False)
    load.add(waiting)
    try:
        refused = user.complete("base")
        assert (refused.status_code, refused.headers["x-ratelimit-scope"]) == (429, "queue;tenant")
        queue = user.call("GET", "/v1/limits").json()["queue"]
        assert (queue["limit"], queue["used"], queue["remaining"]) == (1, 1, 0)
    finally:
        load.remove(waiting)
    assert limits_of(user)["requests", "tenant"]["used"] == 0
    assert user.complete("base").status_code == 200


# ---- token leases ----


def test_a_low_lease_is_extended_with_its_hold_or_not_at_all(product: InProcess) -> None:
    user = user_of(product)
    gateway = product.gateway
    price = make_price(gateway.database)
    prompt = 3 * price.prompt_nanousd
    budget = 400 * price.completion_nanousd + prompt
    limit_budget(gateway.database, user.tenant_id, budget)
    answer = user.call("POST", "/v1/completions", {"model": "base", "prompt": [5, 6, 7],
    "max_tokens": 480})  # fmt: skip
    assert answer.status_code == 200
    message = product.engines.asked[-1]
    assert message.token_lease == 50, "the first lease is only a part"
    # The hold is still open, since no settler runs here.
    engines, leases = FakeEngines(), TokenLeases(gateway.database, gateway.bases.default.running)
    request = RunningRequest(message.request_id, user.tenant_id, 1, 480, is_cold=False)

    async def extend(lease: int, request_id: str) -> None:
        low = LeaseLow(request_id=request_id, num_completion_tokens=1, token_lease=lease)
        leases.extend_soon(engines.find("engine"), low)
        leases.extend_soon(
            engines.find("engine"), low
        )  # a repeated call for the same request has no effect
        await asyncio.gather(*leases._asking.values())

    asyncio.run(extend(50, message.request_id))
    assert engines.extended == [], "the request no longer runs"
    gateway.bases.default.running.add(request)
    lease = 50
    try:
        while lease < 400:
            asyncio.run(extend(lease, message.request_id))
            request_id, longer = engines.extended[-1]
            assert (request_id, longer > lease) == (message.request_id, True)
            hold = gateway.database.read_sync(lambda c: get_hold(c, message.request_id))
            assert hold
            lease = longer
            assert hold.token_lease == lease
        assert (lease, hold.amount_nanousd) == (400, budget), "all that the budget pays for"
    finally:
        gateway.bases.default.running.remove(request)


def test_holds_of_other_requests_are_said_to_be_the_reason_and_when_to_come_again(
    product: InProcess,
) -> None:
    user = user_of(product)
    price = make_price(product.gateway.database)
    limit_budget(product.gateway.database, user.tenant_id, 40 * price.completion_nanousd)
    while (answer := user.complete("base", max_tokens=None)).status_code == 200:
        continue  # no settler runs here, so holds stay open
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (429, "rate_limit_exceeded")
    assert "Other requests of yours hold $0.0000" in error["message"]
    assert answer.headers["x-ratelimit-scope"] == "budget"
    assert answer.headers["retry-after"] == "1"
    assert answer.headers.get("x-should-retry") != "false"


class BusyDatabase:
    """A database whose writes answer in turn: a lease, 0 for a locked row, or an error to raise.
    With the last one, the request ends.
    """

    def __init__(self, answers: list[int | Exception], running: Running) -> None:
        self.answers, self.running = answers, running

    async def write(self, fn: object, order: str) -> int:
        answer = self.answers.pop(0)
        if not self.answers and (request := self.running.find("r1")):
            self.running.remove(request)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("answers", "extended"),
    [
        ([0, LedgerUnavailable("away"), 300], [("r1", 300)]),
        ([0] * 9, []),
        ([256, 256, 300], [("r1", 300)]),
    ],
)
async def test_a_lease_is_asked_for_again_while_nobody_can_say_or_others_hold_what_is_left(
    answers: list[int | Exception], extended: list[tuple[str, int]]
) -> None:
    engines = FakeEngines()
    database = BusyDatabase(answers, running := Running())
    running.add(RunningRequest("r1", "ten_1", 1, 480, is_cold=False))
    leases = TokenLeases(database, running, retry_waits_s=(0, 0, 0))  # type: ignore[arg-type]
    low = LeaseLow(request_id="r1", num_completion_tokens=192, token_lease=256)
    leases.extend_soon(engines.find("engine"), low)
    await asyncio.gather(*leases._asking.values())
    assert not answers, "every answer was asked for"
    assert engines.extended == extended


# ---- counted tokens ----


@pytest.mark.parametrize(("weight", "counted"), [(1.0, 23), (0.5, 15), (0.0, 7)])
def test_a_cached_prompt_token_counts_as_much_as_the_settings_say(
    product: InProcess, weight: float, counted: int
) -> None:
    class CachingEngines(FakeEngines):
        """Engines whose answers have 20 prompt tokens, 16 of them cached, and 3 more tokens."""

        async def generate(self, message: AddRequest, name: str, take: Take) -> None:
            await super().generate(
                message,
                name,
                lambda said: take(said._replace(num_prompt_tokens=20, num_cached_tokens=16)),
            )

    user = user_of(product, tokens_per_minute=1000)
    settings = product.gateway.settings.model_copy(update={"cached_token_weight": weight})
    gateway = with_engines(product.gateway, CachingEngines(), settings=settings)
    here = replace(product, gateway=gateway, _app=None)
    assert replace(user, product=here).complete("base").status_code == 200
    assert limits_of(user)["tokens", "tenant"]["used"] == counted


def test_without_max_tokens_what_is_reserved_is_what_its_requests_come_to(
    product: InProcess,
) -> None:
    user = user_of(product, tokens_per_minute=1000)
    chat = {"model": "base", "messages": [{"role": "user", "content": "Hi"}]}
    reserved = []
    for _ in range(30):
        before = limits_of(user)["tokens", "tenant"]["remaining"]
        answer = user.call("POST", "/v1/chat/completions", chat)
        prompt = answer.json()["usage"]["prompt_tokens"]
        left = int(answer.headers["x-ratelimit-remaining-tokens"])
        reserved.append(before - left - prompt)
    assert reserved[0] == FIRST_GUESS
    assert 3 <= reserved[-1] <= 4, "its answers have three tokens"
