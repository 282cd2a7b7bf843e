"""Idempotency keys: one claim at a time, which always ends; a repeat gets the same answer."""

import asyncio
import json
import random
import uuid
import zlib
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.wire.delivery import Take
from engine.wire.messages import AddRequest, RequestOutput
from registry.errors import Damaged, Fault, Invalid, Overloaded, QuotaExceeded, TimedOut
from server.api import recordings
from server.api.errors import answer_of
from server.billing.tables import holds
from server.database.database import Database, LedgerUnavailable
from server.inference import errors, idempotency
from server.inference.idempotency import (
    KEPT_MS,
    Claim,
    IdempotencyKeys,
    StoredAnswer,
    claim_key,
    prune_keys,
    release_key,
    store_answer,
)
from server.inference.tables import idempotency_keys
from tests.server.asgi_caller import Caller
from tests.server.fake_engines import FakeEngines, make_welcome
from tests.server.in_process import InProcess, User

CLAIM_MS = 60_000
ANSWER = StoredAnswer("r1", 200, {"content-type": "application/json"}, b"body")


def make_claim(key: str = "k", body: bytes = b"{}", tenant: str = "ten_1") -> Claim:
    return Claim.of(tenant, "completions", key, body, uuid.uuid4().hex)


def take(database: Database, claim: Claim, claim_ms: int = CLAIM_MS) -> Any:
    return database.write_sync(lambda conn: claim_key(conn, claim, claim_ms))


def num_keys(database: Database) -> int:
    count = sa.select(sa.func.count()).select_from(idempotency_keys)
    return database.read_sync(lambda conn: conn.scalar(count))


# ---- claims ----


def test_a_key_is_of_one_tenant_and_one_endpoint(each_database: Database) -> None:
    others = [make_claim(tenant="ten_2"), replace(make_claim(), endpoint="chat/completions")]
    for claim in [make_claim(), *others, make_claim(key="K"), make_claim(key="k ")]:
        assert take(each_database, claim) is None


def test_an_answer_is_kept_for_a_day_and_then_forgotten(
    each_database: Database, monkeypatch
) -> None:
    claim = make_claim()
    take(each_database, claim)
    monkeypatch.setattr(idempotency, "KEPT_MS", -1)
    each_database.write_sync(lambda conn: store_answer(conn, claim, ANSWER))
    kept = make_claim("kept")
    take(each_database, kept)
    monkeypatch.setattr(idempotency, "KEPT_MS", KEPT_MS)
    each_database.write_sync(lambda conn: store_answer(conn, kept, ANSWER))
    asyncio.run(IdempotencyKeys(each_database, claim_ms=CLAIM_MS).prune())
    assert num_keys(each_database) == 1
    assert take(each_database, make_claim("kept")).request_id == "r1"
    row = take(each_database, make_claim("kept"))
    assert abs(row.expires_at_ms - row.created_at_ms - KEPT_MS) < 60_000


def test_pruning_goes_on_until_nothing_old_is_left_a_thousand_at_a_time(
    sqlite_database: Database, monkeypatch
) -> None:
    monkeypatch.setattr(idempotency, "PRUNED_AT_ONCE", 3)
    for number in range(7):
        take(sqlite_database, make_claim(str(number)), claim_ms=-1 - KEPT_MS)
    under_way = make_claim("the clock was set ahead")
    take(sqlite_database, under_way, claim_ms=-1)
    assert sqlite_database.write_sync(prune_keys) == 3
    asyncio.run(IdempotencyKeys(sqlite_database, claim_ms=CLAIM_MS).prune())
    assert num_keys(sqlite_database) == 1
    assert sqlite_database.write_sync(lambda conn: store_answer(conn, under_way, ANSWER))


def test_a_tenant_has_so_many_keys_and_no_more(sqlite_database: Database, monkeypatch) -> None:
    monkeypatch.setattr(idempotency, "MAX_KEYS_PER_TENANT", 2)
    keys = IdempotencyKeys(sqlite_database, claim_ms=CLAIM_MS)
    for number in range(2):
        assert asyncio.run(keys.claim(make_claim(str(number)))) is None
    with pytest.raises(Fault) as refused:
        asyncio.run(keys.claim(make_claim("2")))
    assert answer_of(refused.value).status == 429
    assert num_keys(sqlite_database) == 2
    assert asyncio.run(keys.claim(make_claim("2", tenant="ten_2"))) is None


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 3_000_000])
async def test_a_body_is_replayed_in_pieces_and_whole(size: int) -> None:
    body = bytes(number % 251 for number in range(size))
    stored = replace(ANSWER, body=zlib.compress(body))
    chunks = [chunk async for chunk in stored.chunks()]
    assert b"".join(chunks) == body
    assert max(map(len, chunks)) <= 1 << 17


OFTEN = [
    ("claim", 0, b"a"), ("claim", 1, b"a"), ("release", 1, b"a"), ("store", 0, b"a"),
    ("release", 0, b"a"), ("age", 0, b"a"), ("claim", 1, b"b"), ("claim", 2, b"a"),
    ("store", 0, b"a"), ("store", 1, b"b"), ("age", 0, b"a"), ("claim", 2, b"a"),
    ("age", 0, b"a"), ("claim", 3, b"b"), ("store", 2, b"a"), ("release", 2, b"a"),
    ("store", 3, b"b"), ("claim", 0, b"a"),
]  # fmt: skip
"""A gateway that is late, and one that takes over its key."""


@example(steps=OFTEN)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["claim", "release", "store", "age", "prune"]),
            st.integers(0, 3),
            st.sampled_from([b"a", b"b"]),
        ),
        max_size=14,
    )
)
def test_whatever_gateways_do_in_any_order_no_key_is_stuck_and_none_runs_twice(
    each_database: Database, steps: list[tuple[str, int, bytes]]
) -> None:
    """The model has the key's claim and its answer, and whether the key's time is over.

    A gateway that died does nothing more; one that is late may end its claim until another gateway
    takes the key.
    """
    database = each_database
    database.write_sync(lambda conn: conn.execute(sa.delete(idempotency_keys)).rowcount)
    claims: dict[int, Claim] = {}
    owner: Claim | None = None
    answered: Claim | None = None
    is_over = False

    def run_out() -> None:
        past = sa.update(idempotency_keys).values(expires_at_ms=0)
        database.write_sync(lambda conn: conn.execute(past).rowcount)

    for action, gateway, body in steps:
        mine = claims.get(gateway)
        if action == "claim":
            claims[gateway] = claim = make_claim(body=body)
            found, there = take(database, claim), owner or answered
            assert (found is None) == (there is None or is_over)
            if found is None:
                owner, answered, is_over = claim, None, False
            else:
                assert found.body_sha256 == there.body_sha256
                assert (found.status is None) == (answered is None)
        elif action == "release" and mine:
            held = database.write_sync(lambda conn, mine=mine: release_key(conn, mine))
            assert held == (owner is mine)
            owner = None if held else owner
        elif action == "store" and mine:
            kept = database.write_sync(lambda conn, mine=mine: store_answer(conn, mine, ANSWER))
            assert kept == (owner is mine)
            if kept:
                owner, answered, is_over = None, mine, False
        elif action == "age":
            run_out()
            is_over = True
        elif action == "prune":
            database.write_sync(prune_keys)
            if is_over:
                owner = answered = None
    run_out()
    assert take(database, make_claim(body=b"c")) is None, "in the end every key is free"


# ---- over HTTP ----

TEXT = {"model": "base", "prompt": "Hello there", "max_tokens": 9}
STREAM = TEXT | {"stream": True, "stream_options": {"include_usage": True}}
KEY = "Idempotency-Key"


@dataclass
class SteppedEngines(FakeEngines):
    """Engines that answer with tokens one by one.

    ending: fields of the last output, or an exception raised in its place.
    gate: awaited before the last token, if set.
    """

    ending: dict[str, Any] | Exception = field(
        default_factory=lambda: {"finish_reason": "length", "stop_cause": "max_tokens"}
    )
    num_tokens: int = 3
    gate: asyncio.Event | None = None
    num_left: int = 0

    async def generate(self, message: AddRequest, name: str, take: Take) -> None:
        self.asked.append(message)
        num_said = 0
        try:
            for seq in range(self.num_tokens):
                is_last = seq + 1 == self.num_tokens
                if is_last and self.gate:
                    await self.gate.wait()
                if is_last and isinstance(self.ending, Exception):
                    raise self.ending
                fields = {"num_completion_tokens": seq + 1} | (self.ending if is_last else {})
                num_said += 1
                output = RequestOutput(
                    request_id=message.request_id,
                    seq=seq,
                    new_token_ids=(40 + seq % 50,),
                    num_prompt_tokens=len(message.prompt_token_ids),
                    is_last=is_last,
                    **fields,
                )
                take(output)
                await asyncio.sleep(0)
        finally:
            self.num_left += num_said < self.num_tokens


@pytest.fixture
def product(shared_product: InProcess, monkeypatch) -> InProcess:
    """A gateway shared by all tests, with new engines for each."""
    engines = SteppedEngines(welcome=make_welcome())
    shared_product.use(engines)
    return shared_product


@pytest.fixture
def user(product: InProcess) -> User:
    return product.user()


def send(user: User, body: dict[str, Any], key: str = "k", path: str = "completions") -> Any:
    return user.call("POST", f"/v1/{path}", body, {KEY: key})


def num_rows(user: User, table: sa.Table) -> int:
    count = sa.select(sa.func.count()).where(table.c.tenant_id == user.tenant_id)
    return user.product.gateway.database.read_sync(lambda conn: conn.scalar(count))


def num_holds(user: User) -> int:
    return num_rows(user, holds)


@pytest.mark.parametrize("body", [TEXT, STREAM], ids=["whole", "stream"])
def test_a_repeat_is_the_same_answer_byte_for_byte_and_is_paid_for_once(
    user: User, body: dict[str, Any]
) -> None:
    first, again = send(user, body), send(user, body)
    assert first.status_code == again.status_code == 200
    assert first.content == again.content
    assert b"x_chorale" in first.content
    for name in ("content-type", "x-chorale-adapter-digest"):
        assert first.headers[name] == again.headers[name]
    assert KEY.lower() not in first.headers
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert (num_holds(user), len(user.product.engines.asked)) == (1, 1)


def test_a_key_with_another_body_is_refused_and_another_endpoint_is_another_key(
    user: User,
) -> None:
    send(user, TEXT)
    refused = send(user, TEXT | {"max_tokens": 8})
    assert refused.status_code == 422
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("idempotency_error", "idempotency_key_mismatch")
    chat = {"model": "base", "messages": [{"role": "user", "content": "x"}]}
    assert send(user, chat, path="chat/completions").status_code == 200
    assert num_holds(user) == 2


@pytest.mark.parametrize("key", ["", "k" * 256, "caf\u00e9", "tab\tkey"])
def test_a_key_is_short_and_printable(user: User, key: str) -> None:
    refused = user.call("POST", "/v1/completions", TEXT, {KEY: key.encode("latin-1")})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, KEY)
    assert send(user, TEXT, key="k" * 255).status_code == 200


def test_an_answer_that_is_too_long_is_not_kept_and_its_receipt_is_named(
    user: User, monkeypatch
) -> None:
    monkeypatch.setattr(recordings, "MAX_STORED_BYTES", 100)
    first = send(user, STREAM)
    assert first.content.endswith(b"data: [DONE]\n\n")
    again = send(user, STREAM)
    assert (again.status_code, again.headers["x-should-retry"]) == (409, "false")
    request_id = user.product.engines.asked[0].request_id
    assert f"/v1/receipts/{request_id}" in again.json()["error"]["message"]
    assert num_holds(user) == 1


def test_a_repeat_counts_as_a_request_and_takes_no_tokens(product: InProcess) -> None:
    # A request needs 2 or 3 tokens of the prompt and 9 of the answer, so that one fits.
    user = product.user(requests_per_minute=2, tokens_per_minute=14)
    assert [send(user, TEXT).status_code for _ in range(3)] == [200, 200, 429]


# ---- clients that leave, and concurrent repeats ----


def caller_of(user: User, body: dict[str, Any], leave_after: int | None = None) -> Caller:
    return Caller(user, body, {KEY: "k"}, leave_after)


async def until_idle(product: InProcess) -> None:
    while tasks := list(product.gateway.recorder._tasks):
        await asyncio.wait(tasks, timeout=10)


@dataclass
class WatchedKeys:
    """The product's keys, and what a caller has received when its answer is stored."""

    keys: IdempotencyKeys
    caller: Caller
    received: bytes | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.keys, name)

    async def store(self, claim: Claim, answer: StoredAnswer) -> None:
        for _ in range(50):
            await asyncio.sleep(0)
        self.received = b"".join(self.caller.received)
        await self.keys.store(claim, answer)


@pytest.mark.parametrize("is_broken", [False, True], ids=["complete", "broken off"])
@pytest.mark.parametrize("body", [TEXT, STREAM], ids=["whole", "stream"])
async def test_who_has_the_end_of_an_answer_may_repeat_the_request_at_once(
    user: User, monkeypatch, body: dict[str, Any], is_broken: bool
) -> None:
    """The answer is stored before its last piece leaves, be that an answer, [DONE] or an error."""
    if is_broken:
        user.product.engines.ending = {"finish_reason": "error", "stop_cause": "out_of_memory"}
    caller, recorder = caller_of(user, body), user.product.gateway.recorder
    watched = WatchedKeys(recorder._keys, caller)
    monkeypatch.setattr(recorder, "_keys", watched)
    await caller.call()
    await until_idle(user.product)
    assert watched.received is not None
    received = b"".join(caller.received)
    if body is TEXT:
        assert (watched.received, bool(received)) == (b"", True)
    else:
        num_events, num_before = received.count(b"data: "), watched.received.count(b"data: ")
        assert (num_events - num_before, num_before > 0) == (1, True)


@pytest.mark.parametrize("leave_after", [-1, 0, 1, 2])
@pytest.mark.parametrize("body", [TEXT, STREAM], ids=["whole", "stream"])
async def test_a_request_whose_client_left_runs_to_its_end_and_waits_for_the_repeat(
    user: User, body: dict[str, Any], leave_after: int
) -> None:
    """The client leaves at each point of the answer.

    leave_after: -1 is before there is an answer, 0 at its status, else after so many pieces.
    """
    engines = user.product.engines
    engines.gate = asyncio.Event()
    caller = caller_of(user, body, leave_after=leave_after)
    calling = asyncio.create_task(caller.call())
    if leave_after == -1 or body is STREAM:
        await asyncio.wait([calling], timeout=10)
        assert calling.done(), "the client's call ends before the request"
    engines.gate.set()
    await asyncio.wait([calling], timeout=10)
    await until_idle(user.product)
    assert engines.num_left == 0, "the engine was not told to stop"
    repeat = caller_of(user, body)
    await repeat.call()
    assert repeat.headers["idempotent-replayed"] == "true"
    whole = b"".join(repeat.received)
    assert whole.startswith(b"".join(caller.received))
    assert b'"completion_tokens":3' in whole
    assert len(engines.asked) == 1
    assert num_holds(user) == 1
    assert not user.product.gateway.bases.default.running


async def test_without_a_key_the_request_of_a_client_that_left_is_aborted(user: User) -> None:
    user.product.engines.gate = asyncio.Event()
    await Caller(user, STREAM, leave_after=1).call()
    assert user.product.engines.num_left == 1
    assert not user.product.gateway.bases.default.running


async def test_while_a_request_runs_its_repeats_are_told_to_wait(user: User) -> None:
    user.product.engines.gate = asyncio.Event()
    first = caller_of(user, STREAM)
    calling = asyncio.create_task(first.call())
    await first.got.wait()
    second = caller_of(user, STREAM)
    await second.call()
    assert (second.status, second.headers["x-should-retry"]) == (409, "true")
    assert int(second.headers["retry-after"]) >= 1
    error = json.loads(second.received[0])["error"]
    assert (error["type"], error["code"]) == ("idempotency_error", "idempotency_key_in_use")
    user.product.engines.gate.set()
    await calling
    third = caller_of(user, STREAM)
    await third.call()
    assert third.received, "a complete answer is replayed at once"
    assert b"".join(third.received) == b"".join(first.received)


async def test_of_many_at_the_same_moment_one_runs(user: User) -> None:
    callers = [caller_of(user, TEXT) for _ in range(8)]
    await asyncio.gather(*(caller.call() for caller in callers))
    statuses = sorted(caller.status for caller in callers)
    assert statuses[0] == 200
    assert set(statuses) <= {200, 409}
    assert (num_holds(user), len(user.product.engines.asked)) == (1, 1)


async def test_a_gateway_that_stops_lets_go_and_nobody_pays_for_half_an_answer(
    user: User, monkeypatch
) -> None:
    monkeypatch.setattr(recordings, "_CLOSE_S", 0.0)
    user.product.engines.gate = asyncio.Event()
    caller = caller_of(user, STREAM, leave_after=1)
    await caller.call()
    await user.product.gateway.recorder.close()
    request_id = user.product.engines.asked[0].request_id
    hold = sa.select(holds.c.failed_at_ms).where(holds.c.request_id == request_id)
    assert user.product.gateway.database.read_sync(lambda conn: conn.scalar(hold)) is not None
    assert num_rows(user, idempotency_keys) == 0


# ---- recordings ----


@dataclass
class FakeKeys:
    """A store of keys whose first `num_outages` writes fail."""

    claim_ms: int = CLAIM_MS
    num_outages: int = 0
    stored: list[StoredAnswer] = field(default_factory=list)
    num_released: int = 0

    async def store(self, claim: Claim, answer: StoredAnswer) -> None:
        if self.num_outages > 0:
            self.num_outages -= 1
            raise LedgerUnavailable("gone")
        self.stored.append(answer)

    async def release(self, claim: Claim) -> None:
        self.num_released += 1
        raise LedgerUnavailable("gone")


@pytest.mark.parametrize("is_paid", [True, False])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Invalid("no"), 400),
        (Damaged("gone"), 502),
        (TimedOut("late"), 504),
        (RuntimeError("a bug"), 500),
        (errors.engine_unavailable(), None),
        (Overloaded(), None),
        (QuotaExceeded("poor"), None),
        (errors.too_many_idempotency_keys(9), None),
    ],
)
async def test_an_error_is_kept_if_it_was_paid_for_and_would_come_again(
    error: Exception, status: int | None, is_paid: bool
) -> None:
    async def make(recording: recordings.Recording) -> None:
        if is_paid:
            recording.hold({})
        raise error

    keys = FakeKeys()
    recorder = recordings.Recorder(keys, SimpleNamespace(note_answered=None))
    recording = recorder.start(make_claim(), make)
    await asyncio.wait(recorder._tasks)
    if is_paid and status:
        (stored,) = keys.stored
        assert (stored.status, keys.num_released) == (status, 0)
        assert json.loads(zlib.decompress(stored.body))["error"]["message"]
    else:
        assert (keys.stored, keys.num_released) == ([], 1)
        with pytest.raises(type(error)):
            await recording.head()


async def test_an_answer_is_stored_when_the_ledger_is_back_and_its_reader_does_not_wait(
    monkeypatch,
) -> None:
    monkeypatch.setattr(recordings, "_RETRY_S", 0.0)
    keys, answered = FakeKeys(num_outages=3), []
    recorder = recordings.Recorder(keys, SimpleNamespace(note_answered=answered.append))

    async def make(recording: recordings.Recording) -> None:
        recording.request_ids = [recording.claim.request_id]
        recording.hold({})
        await recording.answer(200, {}, b"all of it")

    recording = recorder.start(claim := make_claim(), make)
    assert [chunk async for chunk in recording.body()] == [b"all of it"]
    assert keys.stored == []
    await asyncio.wait(recorder._tasks)
    (stored,) = keys.stored
    assert answered == [claim.request_id], "if its gateway dies before, nobody can have the answer"
    assert b"".join([chunk async for chunk in stored.chunks()]) == b"all of it"


async def test_a_reader_that_does_not_read_holds_up_its_request_and_no_memory() -> None:
    recording = recordings.Recording(make_claim())
    num_put = 0

    async def fill() -> None:
        nonlocal num_put
        for _ in range(500):
            await recording.put(b"event")
            num_put += 1

    filling = asyncio.create_task(fill())
    for _ in range(500):
        await asyncio.sleep(0)
    assert num_put == recordings.MAX_BUFFERED
    body = recording.body()
    await anext(body)
    for _ in range(3):
        await asyncio.sleep(0)
    assert num_put == recordings.MAX_BUFFERED + 1
    await body.aclose()
    await asyncio.wait_for(filling, 10)
    assert num_put == 500, "the request runs on once the reader left"


async def test_of_an_answer_that_is_too_long_nothing_is_kept_in_memory(monkeypatch) -> None:
    monkeypatch.setattr(recordings, "MAX_STORED_BYTES", 5000)
    recording = recordings.Recording(make_claim())
    await recording.leave()
    for seed in range(20):
        await recording.put(random.Random(seed).randbytes(1000))
    assert recording._kept == []


@settings(max_examples=50, deadline=None)
@given(pieces=st.lists(st.binary(min_size=1, max_size=9), max_size=200), turns=st.randoms())
def test_a_reader_gets_all_pieces_in_order_whoever_is_faster(pieces, turns) -> None:
    async def run() -> None:
        recording = recordings.Recording(make_claim())

        async def pause() -> None:
            for _ in range(turns.randrange(3)):
                await asyncio.sleep(0)

        async def make() -> None:
            for piece in pieces:
                await pause()
                await recording.put(piece)
            await recording.finish(b"last")
            recording.end()

        making = asyncio.create_task(make())
        read = []
        async for piece in recording.body():
            read.append(piece)
            await pause()
        await making
        assert read == [*pieces, b"last"]

    asyncio.run(asyncio.wait_for(run(), 10))
