"""The outcome of each crash that decides who pays."""

import pytest

from tests.crash.conftest import CarryOut
from tests.crash.load import Ask
from tests.crash.plans import Plan
from tests.crash.points import Kill
from tests.crash.run import Result

SHORT, LONG = 5, 1000
"""Lengths in tokens. The long request takes longer than the engine waits for a silent gateway."""


def plan(
    number: int,
    max_tokens: int = SHORT,
    *,
    late: bool = False,
    is_stream: bool = True,
    **kills: Kill,
) -> Plan:
    """Make a plan with one request. late: see Life.waits_for_post."""
    return Plan(
        seed=number,
        kills={process: [kill] for process, kill in kills.items()},
        asks=[Ask(max_tokens, (7, 8, 9), is_stream=is_stream)],
        then=[],
        timed=[],
        waits_for_post=late,
        has_drafts=False,  # the kills are counted in tokens
    )


def before_last_output() -> Kill:
    return Kill("engine.send.last.before", 1)


@pytest.fixture(scope="module")
def results(carry_out: CarryOut) -> dict[int, Result]:
    plans = [
        plan(1, gateway=Kill("gateway.commit.hold.after", 1)),
        plan(2, LONG, gateway=Kill("gateway.http.start.after", 1)),
        plan(3, engine=before_last_output(), gateway=Kill("gateway.commit.failed.before", 1)),
        plan(4, 50, engine=Kill("engine.send.tokens.before", 5)),
        plan(5, engine=before_last_output()),
        plan(6, engine=before_last_output(), late=True),
        plan(7, gateway=Kill("gateway.commit.settle.after", 1)),
        plan(8, gateway=Kill("gateway.commit.settle.before", 1)),
        plan(9, is_stream=False, gateway=Kill("gateway.http.start.before", 1)),
        plan(10, gateway=Kill("gateway.http.chunk.before", SHORT)),
    ]
    results = {result.seed: result for result in carry_out(plans, "sqlite")}
    for each in plans:
        result = results[each.seed]
        assert result.wrong == []
        assert set(result.killed_at) == {kill.point for [kill] in each.kills.values()}
    return results


def test_a_hold_whose_request_was_never_sent_is_voided_when_it_expires(
    results: dict[int, Result],
) -> None:
    result = results[1]
    assert [seen.fate for seen in result.seen] == ["reset"]
    assert result.num_expired == 1, "until then it is open: the engine might have the request"
    assert [hold["state"] for hold in result.holds] == ["voided"]
    assert result.events == []


def test_the_request_of_a_dead_gateway_ends_after_its_silence_and_is_posted(
    results: dict[int, Result],
) -> None:
    result = results[2]
    [event], [hold] = result.events, result.holds
    assert [seen.fate for seen in result.seen] == ["reset"]
    assert (event["stop_cause"], event["amount_nanousd"]) == ("gateway_lost", 0)
    assert 1 < event["completion_tokens"] < LONG
    assert (hold["state"], result.num_expired) == ("posted", 0)


def test_a_failure_that_could_not_be_noted_is_noted_by_the_next_gateway(
    results: dict[int, Result],
) -> None:
    result = results[3]
    [event], [seen] = result.events, result.seen
    assert (seen.fate, seen.num_tokens) == ("reset", SHORT - 1)
    assert (event["stop_cause"], event["completion_tokens"]) == ("max_tokens", SHORT)
    assert result.paid == 0


@pytest.mark.parametrize("number", [9, 10], ids=["whole", "stream"])
def test_an_answer_that_its_gateway_had_and_did_not_send_costs_nothing(
    results: dict[int, Result], number: int
) -> None:
    result = results[number]
    [event], [seen] = result.events, result.seen
    assert seen.fate == "reset"
    assert (event["stop_cause"], event["completion_tokens"]) == ("max_tokens", SHORT)
    assert result.paid == 0


def test_what_the_engine_wrote_and_never_sent_is_counted_and_free(
    results: dict[int, Result],
) -> None:
    result = results[4]
    [event], [seen] = result.events, result.seen
    assert (seen.fate, seen.num_tokens) == ("error", 4)
    assert (event["stop_cause"], event["completion_tokens"]) == ("engine_failure", 5)
    assert event["amount_nanousd"] == 0


def test_an_answer_whose_last_output_died_with_the_engine_is_rated_0(
    results: dict[int, Result],
) -> None:
    result = results[5]
    [event], [seen] = result.events, result.seen
    assert (seen.fate, seen.num_tokens) == ("error", SHORT - 1)
    assert (event["stop_cause"], event["completion_tokens"]) == ("max_tokens", SHORT)
    assert (event["is_failed"], event["amount_nanousd"]) == (True, 0)
    assert len(result.entries) == 1


def test_what_was_charged_before_its_failure_was_noted_is_reversed(
    results: dict[int, Result],
) -> None:
    result = results[6]
    charge, correction = sorted(result.entries, key=lambda entry: entry["entry_id"])
    assert [seen.fate for seen in result.seen] == ["error"]
    assert (charge["kind"], correction["kind"]) == ("usage", "correction")
    assert correction["reverses_entry_id"] == charge["entry_id"]
    assert correction["amount_nanousd"] == charge["amount_nanousd"] > 0
    assert correction["debit_account"] == charge["credit_account"]


@pytest.mark.parametrize("number", [7, 8], ids=["after", "before"])
def test_a_settler_killed_around_its_commit_posts_everything_once(
    results: dict[int, Result], number: int
) -> None:
    result = results[number]
    assert result.deaths == ["gateway"]
    assert [event["completion_tokens"] for event in result.events] == [SHORT]
    assert [hold["state"] for hold in result.holds] == ["posted"]
    assert len(result.entries) == 1
