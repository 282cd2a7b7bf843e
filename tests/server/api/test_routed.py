"""Routes under faults over HTTP: what the client gets, which attempts there were, and the bill."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.errors import EngineDeadError, RequestRefused
from engine.wire.messages import AddRequest, RequestOutput
from server.api.serving import Serving
from server.pool.suspects import Suspected
from tests.server.factories import Clock
from tests.server.in_process import InProcess, User
from tests.server.routed_world import (
    HEADER,
    ROUTE,
    Give,
    answer,
    ask,
    attempts,
    cost,
    fail,
    give,
    make_user,
    set_route,
    settle,
    shared,
    user,
)
from tests.server.scripted_product import end_at_once, events

__all__ = ["shared", "user"]  # fixtures that tests use by name


# ---- fallback ----


def test_a_model_that_is_late_with_its_first_token_has_not_begun_by_scoring_the_prompt(
    user: User,
) -> None:
    def score_and_be_late(message: AddRequest) -> list[RequestOutput | BaseException]:
        scored = RequestOutput(message.request_id, 0, prompt_logprobs=())
        late = end_at_once(finish_reason="length", stop_cause="first_token_timeout")
        return [scored, *(output._replace(seq=1) for output in late(message))]

    give(user, small=score_and_be_late)
    answered = ask(user, "fall", prompt_logprobs=1)
    assert (answered.status_code, answered.headers[HEADER]) == (200, "small;late, large;answered")


def test_the_limit_of_an_adapter_is_passed_on_and_the_tenants_is_not(user: User) -> None:
    limits = {"requests_per_minute": 1}
    assert user.call("PUT", "/v1/adapters/small/limits", limits).status_code == 200
    assert ask(user, "fall").headers[HEADER] == "small;answered"
    assert ask(user, "fall").headers[HEADER] == "small;limited, large;answered"
    path = f"/admin/v1/tenants/{user.name}"
    assert user.product.operator.call("PATCH", path, limits).status_code == 200
    user.product.gateway.identities.forget(user.tenant_id)
    ask(user, "fall")
    refused = ask(user, "fall")
    assert (refused.status_code, refused.headers[HEADER]) == (429, "small;refused")
    assert refused.headers["x-ratelimit-scope"] == "requests;tenant"


def test_a_model_that_is_gone_is_passed_over_and_nothing_is_held_for_it(user: User) -> None:
    assert user.call("DELETE", "/v1/adapters/small").status_code == 200
    answered = ask(user, "fall")
    assert answered.headers[HEADER] == "small;missing, large;answered"
    assert attempts(user) == ["large"]
    assert [*settle(user)] == ["2"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_where_no_model_answers_the_client_gets_the_last_error(user: User, stream: bool) -> None:
    give(user, small=fail(EngineDeadError()))
    give(user, large=end_at_once(finish_reason="error", stop_cause="adapter_loading"))
    refused = ask(user, "fall", stream=stream)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "adapter_loading")
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers[HEADER] == "small;unavailable, large;unavailable"
    assert settle(user) == {"1": 0, "2": 0}
    assert not user.product.gateway.bases.num_running
    assert not user.product.gateway.bases.parents


def with_clock(user: User) -> Clock:
    """A clock of the gateway's that only the test moves."""
    clock, gateway = Clock(), user.product.gateway
    serving: Serving = replace(gateway.serving, clock=clock)
    vars(gateway)["serving"] = serving
    return clock


def late_after(clock: Clock, passed_s: float) -> Give:
    def give_late(message: AddRequest) -> list[RequestOutput | BaseException]:
        clock.now += passed_s
        return [*end_at_once(finish_reason="length", stop_cause="first_token_timeout")(message)]

    return give_late


def test_attempts_share_the_requests_time_and_each_has_its_models_first_token_timeout(
    user: User,
) -> None:
    models = [{"model": "small", "first_token_timeout_s": 5}, {"model": "large"}]
    set_route(user, "timed", {"strategy": "fallback", "models": models})
    clock, settings = with_clock(user), user.product.gateway.settings
    give(user, small=late_after(clock, 5.0))
    assert ask(user, "timed").headers[HEADER] == "small;late, large;answered"
    first, second = user.product.engines.asked
    whole = settings.request_timeout_s
    assert (first.deadline_s, first.first_token_timeout_s) == (whole, 5)
    assert (second.deadline_s, second.first_token_timeout_s) == (
        whole - 5,
        min(settings.first_token_timeout_s, whole - 5),
    )


def test_no_attempt_begins_after_the_requests_deadline(user: User) -> None:
    clock = with_clock(user)
    give(user, small=late_after(clock, user.product.gateway.settings.request_timeout_s))
    refused = ask(user, "fall")
    assert (refused.status_code, refused.headers[HEADER]) == (503, "small;late")
    assert attempts(user) == ["small"]


# ---- cascade ----


def test_logprobs_that_were_asked_for_are_shown(user: User) -> None:
    shown = ask(user, "up", logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]
    assert [each["logprob"] for each in shown["content"]] == pytest.approx([-0.15, -0.05])
    assert user.product.engines.asked[0].sampling_params.logprobs == 2


def test_the_least_likely_of_several_answers_decides(user: User) -> None:
    give(user, small=answer(-0.1, -0.1, -0.6))
    assert ask(user, "up", n=2).headers[HEADER] == "small;answered"
    both = ask(user, "up", n=3)
    assert both.headers[HEADER] == "small;weak, large;answered"
    assert len(both.json()["choices"]) == 3


def test_an_unlikely_answer_at_the_deadline_is_the_answer(user: User) -> None:
    clock = with_clock(user)

    def give_slowly(message: AddRequest) -> list[RequestOutput | BaseException]:
        clock.now += user.product.gateway.settings.request_timeout_s
        return answer(-9.0)(message)

    give(user, small=give_slowly)
    answered = ask(user, "up")
    assert (answered.status_code, answered.headers[HEADER]) == (200, "small;weak")


# ---- any sequence ----

WEAK = -0.9
GIVES: dict[str, Give] = {
    "good": answer(-0.1),
    "unlikely": answer(WEAK),
    "breaks off": answer(-0.1, then=EngineDeadError("it died")),
    "full": fail(RequestRefused("queue_full")),
    "suspected": fail(Suspected(2.0)),
    "dead": fail(EngineDeadError("it died")),
    "late": end_at_once(finish_reason="length", stop_cause="first_token_timeout"),
    "damaged": end_at_once(finish_reason="error", stop_cause="adapter_corrupt"),
    "broken": end_at_once(finish_reason="error", stop_cause="engine_failure"),
    "not invoked": end_at_once(finish_reason="error", stop_cause="adapter_not_invoked"),
}
WORDS = {
    "full": "overloaded", "suspected": "unavailable", "dead": "unavailable", "late": "late",
    "damaged": "missing", "broken": "failed", "not invoked": "refused",
}  # fmt: skip


@dataclass
class Told:
    """The attempts of a request by the rules, its end, and what is paid."""

    words: list[str] = field(default_factory=list)
    answering: int | None = None
    is_broken: bool = False
    paid: dict[str, bool] = field(default_factory=dict)


def told_by_the_rules(strategy: str, models: Sequence[str]) -> Told:
    told = Told()
    for number, gives in enumerate(models, start=1):
        is_judged = strategy == "cascade" and number < len(models)
        if gives not in ("full", "suspected"):  # no engine ever had those
            told.paid[str(number)] = gives in ("good", "unlikely")
        if is_judged and gives in ("unlikely", "breaks off"):
            told.words.append("weak" if gives == "unlikely" else "unavailable")
            told.answering = number if gives == "unlikely" else told.answering
            continue
        told.words.append(WORDS.get(gives, "answered"))
        if gives not in WORDS:
            told.answering, told.is_broken = number, gives == "breaks off"
        if gives not in WORDS or gives == "not invoked":
            break
    return told


@given(
    strategy=st.sampled_from(["fallback", "cascade"]),
    models=st.lists(st.sampled_from(sorted(GIVES)), min_size=1, max_size=5),
    stream=st.booleans(),
)
# An answer that has begun is not begun again elsewhere, unless nobody has seen it yet.
@example(strategy="fallback", models=["breaks off", "good"], stream=False)
@example(strategy="cascade", models=["breaks off", "good"], stream=True)
# The last model streams at once, and an unlikely answer is better than an error.
@example(strategy="cascade", models=["unlikely", "breaks off"], stream=True)
@example(strategy="cascade", models=["unlikely", "full"], stream=True)
@example(strategy="cascade", models=["unlikely", "full"], stream=False)
@example(strategy="fallback", models=["full", "suspected", "dead", "late", "good"], stream=False)
@example(strategy="fallback", models=["broken", "damaged", "not invoked", "good"], stream=True)
@example(strategy="cascade", models=["unlikely", "good"], stream=True)
@settings(max_examples=25, deadline=None)
def test_client_and_bill_get_what_the_rules_say_whatever_each_model_does(
    shared: InProcess, strategy: str, models: list[str], stream: bool
) -> None:
    names = [f"m{number}" for number in range(len(models))]
    user = make_user(shared, **dict(zip(names, (GIVES[each] for each in models), strict=True)))
    members: list[dict[str, Any]] = [{"model": name} for name in names]
    if strategy == "cascade":
        members = [each | {"min_mean_logprob": -0.5} for each in members[:-1]] + members[-1:]
    set_route(user, "r", {"strategy": strategy, "models": members})
    options = {"include_usage": True} if stream else None
    answered = ask(user, "r", stream=stream, stream_options=options)
    told = told_by_the_rules(strategy, models)
    ends = [f"{name};{word}" for name, word in zip(names, told.words, strict=False)]
    assert (answered.headers[HEADER], answered.headers[ROUTE]) == (", ".join(ends), "r")
    is_answered = told.answering is not None and (stream or not told.is_broken)
    assert (answered.status_code == 200) == is_answered
    if is_answered:
        assert f'"model":"{names[(told.answering or 0) - 1]}"' in answered.text
        assert ('"error"' in answered.text) == told.is_broken
    asked = user.product.engines.asked
    is_judged = [strategy == "cascade" and name != names[-1] for name in attempts(user)]
    wanted = [each.sampling_params.logprobs for each in asked]
    assert wanted == [0 if judged else None for judged in is_judged]
    paid = settle(user)
    assert {number: amount > 0 for number, amount in paid.items()} == told.paid
    if is_answered and not told.is_broken:
        said = events(answered)[-1] if stream else answered.json()
        assert said["id"] == f"chatcmpl-{asked[0].request_id[:-2]}.{told.answering}"
        assert cost(said["usage"]) == paid[str(told.answering)]
        assert all(choice["logprobs"] is None for choice in said["choices"])
    assert not shared.gateway.bases.num_running
    assert not shared.gateway.bases.parents


# ---- weights ----


def test_a_key_of_the_caller_always_gets_the_same_model_of_weights(user: User) -> None:
    models = [{"model": "small", "weight": 1}, {"model": "large", "weight": 1}]
    set_route(user, "split", {"strategy": "weights", "models": models})
    chosen = {
        key: {ask(user, "split", prompt_cache_key=key).headers[HEADER] for _ in range(2)}
        for key in map(str, range(24))  # once in eight million runs all choose alike
    }
    assert all(len(each) == 1 for each in chosen.values())
    assert set.union(*chosen.values()) == {"small;answered", "large;answered"}


# ---- other fields of a request ----


def test_completions_shapes_and_lists_of_prompts_are_admitted_anew_for_each_model(
    user: User,
) -> None:
    give(user, small=answer(-9.0))
    body = {"model": "up", "prompt": ["one", "two"], "n": 2, "max_tokens": 9}
    shape = {"structured_outputs": {"choice": ["yes", "no"]}}
    answered = user.call("POST", "/v1/completions", body | shape)
    assert answered.headers[HEADER] == "small;weak, large;answered"
    assert len(answered.json()["choices"]) == 4
    first, second = user.product.engines.asked
    assert first.grammar == second.grammar != ""
    assert first.prompts == second.prompts


# ---- requests without a route ----


def test_a_request_without_a_route_costs_no_new_query(user: User) -> None:
    queries: list[str] = []
    engine = user.product.gateway.database.engine

    def note(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        queries.append(statement)

    ask(user, "small")
    sa.event.listen(engine, "before_cursor_execute", note)
    try:
        for model in ("small", "base"):
            give(user, base=answer(-0.1))
            answered = ask(user, model)
            assert answered.status_code == 200
            assert HEADER not in answered.headers
        assert queries
        assert not [each for each in queries if "routes" in each]
        user.product.gateway.routes.forget()
        ask(user, "small")
        assert [each for each in queries if "routes" in each], "the listener would have seen one"
    finally:
        sa.event.remove(engine, "before_cursor_execute", note)
