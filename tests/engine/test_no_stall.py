"""A store that never answers delays only the requests that wait for it."""

import hashlib
import threading

import pytest

from engine.wire.messages import (
    AbortRequests,
    AddRequest,
    Prefetch,
    SamplingParams,
    StepOutputs,
)
from tests.engine.churn import ALARM, build_core, canonical_adapter
from tests.faulty_s3 import CREDENTIALS, faulty_s3
from tests.lora.factories import FetcherProcess, put_object, wait_for
from tests.watched import forbidden_calls

NUM_STREAMS = 8
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def s3():
    with faulty_s3() as s3:
        yield s3


def upload(s3, code, tenant_id):
    """Put the adapter of a code into the bucket for a tenant; return its ref."""
    data = canonical_adapter(code, 8, salt=code)
    return put_object(s3, f"tenants/{tenant_id}/{hashlib.sha256(data).hexdigest()}", data)


@pytest.fixture
def engine(s3, tmp_path):
    """A core whose fetcher reads from the faulty store."""
    environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": s3.url}
    fetcher = FetcherProcess(tmp_path, "s3://bucket", environment=environment)
    yield build_core(tmp_path, fetcher.cache, fetcher.path, num_slabs=200)
    s3.clear()
    fetcher.kill()


def ask(core, name, ref, num_tokens):
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    message = AddRequest(
        request_id=name,
        tenant_id="t",
        prompt_token_ids=tuple(range(20)),
        sampling_params=sampling,
        token_lease=num_tokens,
        deadline_s=600.0,
        first_token_timeout_s=600.0,
        adapter=ref,
    )
    assert core.handle("gw", message) == []


def step_until_ended(core, names):
    """Step until the requests have ended; return their tokens and the number of steps."""
    tokens = {name: [] for name in names}
    ended, steps = set(), core.num_steps
    while not ended >= set(names):
        for _, message in core.step():
            assert isinstance(message, StepOutputs)
            for output in message.outputs:
                tokens[output.request_id] += output.new_token_ids
                if output.is_last:
                    assert output.stop_cause == "max_tokens"
                    ended.add(output.request_id)
    return tokens, core.num_steps - steps


def make_resident(core, refs):
    for number, ref in enumerate(refs):
        ask(core, f"warm-{number}", ref, 1)

    def is_over():
        core.step()
        return not core.scheduler.has_work

    wait_for(is_over)
    assert all(core.adapters.is_ready(ref.object_key) for ref in refs)


def test_streams_take_the_same_steps_beside_a_store_that_never_answers(engine, s3):
    """Eight streams, two of them on the base model, run alone and then beside thirty requests and
    as many prefetches for adapters that never arrive; the engine's thread must not block.
    """
    refs = [upload(s3, code, "resident") for code in range(NUM_STREAMS - 2)]
    make_resident(engine, refs)
    streams = [*refs, None, None]
    cold = [(upload(s3, code, "cold"), upload(s3, code + 30, "cold")) for code in range(100, 130)]
    results = []

    def ask_for_cold():
        for number, (asked, prefetched) in enumerate(cold):
            ask(engine, f"cold-{number}", asked, 5)
            engine.handle("gw", Prefetch(tenant_id=f"t{number}", adapter=prefetched))

    def stream(names):
        for name, ref in zip(names, streams, strict=True):
            ask(engine, name, ref, NUM_TOKENS)
        results.append(step_until_ended(engine, names))

    for round_number in range(2):
        if round_number:
            s3.fail("hang", key="tenants/cold/")
            assert forbidden_calls(ask_for_cold) == []
            wait_for(lambda: engine.step() == [] and s3.count("tenants/cold/") > 0)
        names = [f"stream-{round_number}-{number}" for number in range(NUM_STREAMS)]
        assert forbidden_calls(lambda names=names: stream(names)) == []
    (quiet, quiet_steps), (stormy, stormy_steps) = results
    assert list(quiet.values()) == list(stormy.values())
    for code, tokens in enumerate(stormy.values()):
        assert tokens == [code if code < len(refs) else ALARM] * NUM_TOKENS
    assert stormy_steps == quiet_steps
    # The aborted requests' fetches are dropped, which releases the hanging reads.
    engine.handle("gw", AbortRequests(request_ids=tuple(f"cold-{n}" for n in range(len(cold)))))
    engine.step()
    assert not engine.scheduler.has_work


def test_the_hooks_see_what_they_are_to_see(tmp_path):
    """The test above relies on these hooks."""
    lock = threading.Lock()
    assert "lock.acquire" in forbidden_calls(lock.acquire)
    assert "open" in forbidden_calls(lambda: (tmp_path / "x").write_text("x"))
