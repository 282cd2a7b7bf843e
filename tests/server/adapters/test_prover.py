"""The prover between uploads and an engine: the proofs it asks for, and how answers are used."""

import asyncio
import contextlib
import hashlib
import time
from dataclasses import replace

import pytest

from engine.errors import EngineAwayError, EngineDeadError
from registry.base.base_model import BaseModel
from registry.base.base_models import BaseModels
from registry.catalog.catalog import Catalog
from registry.ref import BaseRef
from registry.storage.free_space import WorkDir
from registry.storage.storage import LocalStorage
from registry.uploads.ends import ProofFailed, check_fault
from registry.uploads.proof import Proof
from server.adapters.prover import Prover
from tests.registry.factories import Clock, make_base, sound_files
from tests.registry.upload_world import Uploads

A = "tenant-a"


class FakeEngine:
    """An engine that answers each proof with a given Proof or exception once `go` is set."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.is_ready = True
        self.asked, self.were_alone, self.bases = [], [], []
        self.num_inside = self.most_inside = 0
        self.go = asyncio.Event()
        self.go.set()

    async def prove(self, base, adapter, path, alone):
        self.were_alone.append(alone)
        self.bases.append(base)
        data = path.read_bytes()
        assert (hashlib.sha256(data).hexdigest(), len(data)) == (adapter.digest, adapter.size_bytes)
        self.asked.append((adapter, path))
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        try:
            await self.go.wait()
        finally:
            self.num_inside -= 1
        answer = self.answers.pop(0) if self.answers else Proof(verdict="passed")
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> BaseModel:
    return make_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def clock():
    return Clock(time.time())


@pytest.fixture
def uploads(sqlite_database, base, clock, tmp_path):
    work = WorkDir(tmp_path / "work")
    work.path.mkdir()
    catalog, storage = Catalog(BaseModels(base), clock), LocalStorage(tmp_path / "store")
    return Uploads(sqlite_database.begin, catalog, storage, clock, work)


@pytest.fixture
def make_proving(uploads, base):
    def make(seed=1):
        files = sound_files(base, seed=seed)
        return uploads.build(uploads.send_all(uploads.open(files, name=f"name-{seed}"), files))

    return make


@pytest.fixture
def make_prover(uploads, sqlite_database):
    def make(engine, **config):
        config = {"poll_s": 0.01, "notice_s": 0.01, "retry_s": 0.0, **config}
        return Prover(
            sqlite_database,
            uploads.catalog,
            uploads.storage,
            engine.prove,
            is_ready=lambda: engine.is_ready,
            work=uploads.work,
            now_ms=uploads.now_ms,
            **config,
        )

    return make


@contextlib.asynccontextmanager
async def running(*provers):
    tasks = [asyncio.create_task(prover.run()) for prover in provers]
    try:
        async with asyncio.timeout(20):
            yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def prove_all(prover, *found):
    async with running(prover):
        return [await prover.wait_proved(upload, 20) for upload in found]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


async def test_the_engine_reads_the_object_and_what_passed_is_a_version(
    make_proving, make_prover, base, tmp_path
):
    engine = FakeEngine(Proof(verdict="passed", max_effect=1.5))
    upload = make_proving()
    (proved,) = await prove_all(make_prover(engine), upload)
    assert (proved.state, proved.version) == ("complete", 1)
    assert proved.built.passport["canary"]["max_effect"] == 1.5
    (adapter, path) = engine.asked[0]
    assert adapter.object_key == upload.built.object_key
    assert engine.bases == [BaseRef(base.base_revision, base.model_id, base.variant)]
    assert not path.exists()
    assert list((tmp_path / "work").iterdir()) == []


async def test_what_did_not_pass_has_failed_with_the_engines_words(make_proving, make_prover):
    engine = FakeEngine(Proof(verdict="mismatch", message="It differs."))
    (proved,) = await prove_all(make_prover(engine), make_proving())
    assert (proved.state, proved.error_code, proved.error) == ("failed", "mismatch", "It differs.")


async def test_an_engine_that_says_it_cannot_now_is_asked_again(make_proving, make_prover):
    engine = FakeEngine(Proof(verdict="unavailable"), EngineDeadError("killed"))
    (proved,) = await prove_all(make_prover(engine), make_proving())
    assert (proved.state, len(engine.asked)) == ("complete", 3)


async def test_after_an_engine_died_it_is_tried_alone_and_no_more_and_nobody_blames_the_adapter(
    make_proving, make_prover
):
    engine = FakeEngine(*[EngineDeadError("killed")] * 9)
    (proved,) = await prove_all(make_prover(engine), make_proving())
    assert (proved.state, proved.error_code) == ("failed", "proof_failed")
    assert engine.were_alone == [False, True]
    with pytest.raises(ProofFailed, match="not of the adapter"):
        check_fault(proved)


async def test_without_an_engine_nothing_is_claimed_and_the_answer_does_not_wait_for_ever(
    make_proving, make_prover
):
    engine = FakeEngine()
    engine.is_ready = False
    prover, upload = make_prover(engine), make_proving()
    async with running(prover):
        found = await prover.wait_proved(upload, 0.05)
    assert found.state == "proving"
    assert engine.asked == []
    engine.is_ready = True
    (proved,) = await prove_all(make_prover(engine), upload)
    assert proved.state == "complete"


async def test_two_gateways_prove_each_upload_once(make_proving, make_prover):
    found = [make_proving(seed) for seed in range(1, 6)]
    engine = FakeEngine()
    provers = [make_prover(engine) for _ in range(2)]
    async with running(*provers):
        proved = [await provers[0].wait_proved(upload, 20) for upload in found]
    assert {upload.state for upload in proved} == {"complete"}
    digests = [adapter.digest for adapter, _ in engine.asked]
    assert sorted(digests) == sorted(upload.built.digest for upload in found)


async def test_an_upload_whose_base_model_is_at_rest_waits_while_the_others_serve(
    make_proving, make_prover
):
    """The gateway is ready, since other base models are: nobody died of the adapter."""
    engine = FakeEngine(*[EngineAwayError("the base model is at rest")] * 4)
    (proved,) = await prove_all(make_prover(engine), make_proving())
    assert (proved.state, len(engine.asked)) == ("complete", 5)


async def test_an_engine_is_asked_one_at_a_time_and_no_more_are_taken_than_there_is_room_for(
    make_proving, make_prover, tmp_path
):
    found = [make_proving(seed) for seed in range(1, 6)]
    engine = FakeEngine()
    engine.go.clear()
    prover = make_prover(engine, max_running=2)
    async with running(prover):
        await until(lambda: len(list((tmp_path / "work").iterdir())) == 2)
        await prover.step()
        fetched = len(list((tmp_path / "work").iterdir()))
        engine.go.set()
        proved = [await prover.wait_proved(upload, 20) for upload in found]
    assert (fetched, engine.most_inside) == (2, 1)
    assert {upload.state for upload in proved} == {"complete"}


async def test_a_long_proof_keeps_its_claim_and_a_stopped_gateway_gives_it_back(
    make_proving, make_prover, uploads, clock
):
    make_proving()
    slow = FakeEngine()
    slow.go.clear()
    prover = make_prover(slow, max_running=1)

    async with running(prover):
        await until(lambda: slow.asked)
        for _ in range(3):
            clock.now_s += 8
            await prover.step()
            assert uploads.claim() == []
    assert len(uploads.claim()) == 1


async def test_a_killed_gateways_upload_is_proved_when_its_claim_has_run_out(
    make_proving, make_prover, uploads, clock
):
    upload = make_proving()
    assert uploads.claim(1)
    engine = FakeEngine()
    prover = make_prover(engine)
    async with running(prover):
        early = await prover.wait_proved(upload, 0.05)
        clock.now_s += 10
        late = await prover.wait_proved(upload, 20)
    assert (early.state, late.state) == ("proving", "complete")


async def test_an_object_that_the_store_damaged_is_not_the_adapters_fault(
    make_proving, make_prover, uploads, tmp_path
):
    upload, engine = make_proving(), FakeEngine()
    path = tmp_path / "store" / upload.built.object_key
    whole = path.read_bytes()
    path.write_bytes(b"x" + whole[1:])
    prover = make_prover(engine)
    async with running(prover):
        damaged = await prover.wait_proved(upload, 0.1)
        path.write_bytes(whole)
        mended = await prover.wait_proved(upload, 20)
    assert (damaged.state, mended.state) == ("proving", "complete")
    assert len(engine.asked) == 1


async def test_what_was_checked_against_another_base_model_is_not_proved_against_this_one(
    make_proving, make_prover, uploads, base
):
    upload, engine = make_proving(), FakeEngine()
    uploads.catalog.bases.replace(replace(base, base_revision="0" * 64))
    (proved,) = await prove_all(make_prover(engine), upload)
    assert (proved.state, proved.error_code, engine.asked) == ("failed", "not_served", [])
