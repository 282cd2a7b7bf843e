"""Requests served by an engine in this process: when they are sent, and their outcomes."""

from itertools import pairwise

import pytest

from bench.in_process import EngineFactory
from bench.session import Ask, Session, run


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> EngineFactory:
    return EngineFactory("tiny", tmp_path_factory.mktemp("bench"))


def make_core(factory: EngineFactory, **settings: object):
    return factory.make(arena_tokens=1024, **({"max_model_len": 256} | settings))


def make_asks(count: int, prompt_len: int = 7, max_tokens: int = 3, **fields: object) -> list[Ask]:
    return [
        Ask(prompt_token_ids=(2 + i,) * prompt_len, max_tokens=max_tokens + i, **fields)
        for i in range(count)
    ]


def test_every_token_has_the_time_of_its_step(factory: EngineFactory) -> None:
    outcomes = run(make_core(factory), make_asks(5))
    assert [len(o.token_ids) for o in outcomes] == [3, 4, 5, 6, 7]
    for outcome in outcomes:
        assert len(outcome.chunk_s) == len(outcome.token_ids)
        assert outcome.sent_s < outcome.chunk_s[0]
        assert all(a < b for a, b in pairwise(outcome.chunk_s))
        assert outcome.end_s == outcome.chunk_s[-1]
        assert outcome.error is None


def test_a_static_batch_begins_when_the_last_one_of_the_batch_before_has_ended(
    factory: EngineFactory,
) -> None:
    outcomes = run(make_core(factory), make_asks(7), batch_size=3)
    batches = [outcomes[:3], outcomes[3:6], outcomes[6:]]
    for before, after in pairwise(batches):
        assert max(o.end_s for o in before) <= min(o.sent_s for o in after)


def test_without_batches_a_newcomer_joins_those_that_run(factory: EngineFactory) -> None:
    first, second = run(make_core(factory), make_asks(2, max_tokens=9))
    assert second.chunk_s[0] < first.end_s


def test_a_request_is_not_sent_before_it_is_due(factory: EngineFactory) -> None:
    (outcome,) = run(make_core(factory), make_asks(1, due_s=0.02))
    assert outcome.sent_s >= 0.02


def test_what_is_open_when_the_run_is_stopped_is_unfinished(factory: EngineFactory) -> None:
    assert run(make_core(factory), make_asks(2), stop_s=0.0) == []
    session = Session(make_core(factory))
    session.send(*make_asks(1, max_tokens=100))
    while not session.num_tokens(0):
        session.step()
    session.stop()
    (outcome,) = session.outcomes()
    assert outcome.error == "abort"
    assert len(outcome.token_ids) < 100


def test_a_request_that_is_refused_has_an_error_and_no_tokens(factory: EngineFactory) -> None:
    (outcome,) = run(make_core(factory), make_asks(1, prompt_len=999))
    assert outcome.error == "prompt_too_long"
    assert outcome.chunk_s == ()


def test_a_fresh_engine_knows_no_prefix(factory: EngineFactory) -> None:
    asks = make_asks(1, prompt_len=133) * 2
    for _ in range(2):
        core = make_core(factory)
        run(core, asks, batch_size=1)
        assert core.take_stats().cached_tokens == 128
