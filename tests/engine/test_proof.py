"""Proofs around a fake model: verdicts, their receivers, and effects on other requests."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from engine.proofs.proof import MAX_WAITING, Answer, Compared, judge
from engine.steps.batch import BAD_LOGITS
from engine.wire.messages import (
    PROOF_TENANT,
    PROVING,
    ProofResult,
    ProveAdapter,
    StepOutputs,
    TokenLogprobs,
)
from lora.errors import Failure
from registry.ref import AdapterRef
from tests.engine.fakes import (
    FakeClock,
    FakeLoader,
    FakeReference,
    expected_tokens,
    make_core,
    make_message,
    make_scheduler,
    tokens_of,
)
from tests.engine.small_disk import SmallDisk, make_journal


@pytest.fixture
def adapter(tmp_path):
    """An adapter whose object lies in a file, as the gateway provides it."""
    path = tmp_path / "object"
    path.write_bytes(b"canonical")
    digest = hashlib.sha256(b"canonical").hexdigest()
    return AdapterRef("ad_1", 1, digest, f"tenants/t/{digest}", 8, 9)


@pytest.fixture
def ask(tmp_path, adapter):
    def make(proof_id="p1", **fields):
        return ProveAdapter(
            proof_id=proof_id, adapter=adapter, object_path=str(tmp_path / "object"), **fields
        )

    return make


def run(core, most=500):
    """Step until no work is left; return proofs by id, and the outputs of other requests."""
    proofs, outputs = {}, {}
    for _ in range(most):
        if not core.has_work:
            core.scheduler.check_integrity()
            return proofs, outputs
        for gateway_id, message in core.step():
            if isinstance(message, ProofResult):
                proofs[message.proof_id] = (gateway_id, message.proof)
            elif isinstance(message, StepOutputs):
                for output in message.outputs:
                    outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError("the engine never became idle")


def verdict(core, message):
    assert core.handle("gw", message) == []
    _, proof = run(core)[0][message.proof_id]
    return proof.verdict


def test_an_adapter_that_is_what_it_was_merged_to_passes(tmp_path, ask):
    core = make_core(tmp_path)
    assert core.handle("gw-7", ask()) == []
    proofs, outputs = run(core)
    gateway_id, proof = proofs["p1"]
    assert (gateway_id, proof.verdict, proof.message) == ("gw-7", "passed", "")
    assert (proof.num_prompts, proof.num_tokens) == (2, 8)
    assert proof.max_difference <= proof.tolerance < proof.max_effect
    assert proof.device_bytes == core.scheduler.layout.slab_bytes
    assert proof.cold_load_s is not None
    assert outputs == {}, "a proof's tokens are not sent"


def test_served_weights_that_are_not_the_objects_are_a_mismatch(tmp_path, ask):
    core = make_core(tmp_path)
    core.proofs.reference.merges = "another digest"
    assert verdict(core, ask()) == "mismatch"


def test_an_adapter_that_changes_nothing_has_no_effect(tmp_path, ask):
    core = make_core(tmp_path)
    core.proofs.reference.merges = None
    assert verdict(core, ask()) == "no_effect"


def test_an_adapter_that_changes_less_than_the_rounding_of_the_base_has_a_warning(tmp_path, ask):
    core = make_core(tmp_path)
    core.proofs.reference.rounding = 9.0
    core.handle("gw", ask())
    _, proof = run(core)[0]["p1"]
    assert (proof.verdict, proof.base_agreement) == ("passed", 1.0)
    assert proof.base_shift == pytest.approx(9.0)
    assert proof.warnings[0].startswith("The base model's weights are rounded to few bits")


def test_without_the_weights_before_rounding_nothing_is_said_of_it(tmp_path, ask):
    core = make_core(tmp_path)
    core.handle("gw", ask())
    _, proof = run(core)[0]["p1"]
    assert (proof.base_shift, proof.base_agreement) == (None, None)


def test_an_activated_lora_is_invoked(tmp_path, ask, adapter):
    loader = FakeLoader()
    loader.invocation_tokens = {adapter.object_key: (7, 8, 9)}
    core = make_core(tmp_path, make_scheduler(loader=loader))
    core.proofs.reference.invocation = (7, 8, 9)
    assert verdict(core, ask()) == "passed"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("missing", "unavailable"), ("corrupt", "unavailable"), ("incompatible", "not_served")],
)
def test_an_adapter_that_cannot_be_had_is_the_stores_fault_or_its_own(
    tmp_path, ask, adapter, kind, expected
):
    loader = FakeLoader()
    loader.failures[adapter.object_key, "disk"] = Failure(kind, "it is so")
    assert verdict(make_core(tmp_path, make_scheduler(loader=loader)), ask()) == expected


def test_an_adapter_that_is_larger_than_the_arena_is_not_served(tmp_path, ask, adapter):
    loader = FakeLoader()
    loader.slabs[adapter.object_key] = 65
    assert verdict(make_core(tmp_path, make_scheduler(loader=loader)), ask()) == "not_served"


def test_values_that_are_not_finite_when_served_are_the_adapters_fault(tmp_path, ask, adapter):
    core = make_core(tmp_path)
    collect = core.runner.collect

    def poisoned():
        rows, step = core.runner._launched[0].rows, collect()
        tokens = [BAD_LOGITS if row.adapter_key else token
                  for row, token in zip(rows, step.token_ids, strict=True)]  # fmt: skip
        return replace(step, token_ids=tokens)

    core.runner.collect = poisoned
    assert verdict(core, ask()) == "not_finite"


def test_values_that_are_not_finite_when_merged_are_the_adapters_fault(tmp_path, ask):
    core = make_core(tmp_path)
    compare = core.proofs.reference.compare

    def poisoned(sequences, object_path):
        compared = yield from compare(sequences, object_path)
        compared.merged[-1, 255] = np.inf
        return compared

    core.proofs.reference.compare = poisoned
    assert verdict(core, ask()) == "not_finite"


def test_what_is_too_little_to_be_told_from_rounding_is_a_warning():
    message = make_message()
    vocabulary = np.zeros((2 * (9 + 3), 256), np.float32)
    served = [TokenLogprobs(logprob=0.0, top=((3, 1e-4), (4, 0.0)))] * 4
    answers = [Answer(message, (3, 3, 3, 3), tuple(served))] * 2
    rounded = [TokenLogprobs(logprob=0.0, top=((3, 5e-5), (4, 0.0)))]
    base = [Answer(message, (3,), tuple(rounded))] * 2
    merged = vocabulary.copy()
    merged[:, 3] = 1e-4
    proof = judge(base, answers, Compared(vocabulary, merged), precision=0.005)
    assert (proof.verdict, len(proof.warnings)) == ("passed", 1)
    exact = [Answer(message, (3,), (TokenLogprobs(logprob=0.0, top=((3, 0.0), (4, 0.0))),))] * 2
    proof = judge(exact, answers, Compared(vocabulary, merged), precision=0.005)
    assert (proof.verdict, proof.warnings) == ("passed", ())


def test_its_requests_are_of_the_batch_class_and_nothing_of_them_is_kept(tmp_path, ask, adapter):
    loader = FakeLoader()
    loader.failures[adapter.object_key, "disk"] = Failure("incompatible", "it is so")
    core = make_core(tmp_path, make_scheduler(loader=loader))
    core.handle("gw", ask())
    core.step()
    core.step()
    assert {group.message.priority for group in core.scheduler.groups.values()} == {1}
    assert run(core)[0]["p1"][1].verdict == "not_served"
    assert core.proofs._outputs == {}


def test_a_proof_that_is_refused_half_way_leaves_no_request_behind(tmp_path, ask):
    core = make_core(tmp_path, make_scheduler(max_waiting=1))
    assert verdict(core, ask()) == "unavailable"
    assert core.proofs._outputs == {}
    [record] = core.journal.read(0, 100).records
    assert (record.stop_cause, record.num_completion_tokens) == ("aborted", 0)


def test_a_missing_file_says_nothing_about_the_adapter(tmp_path, ask):
    core = make_core(tmp_path)
    (tmp_path / "object").unlink()
    assert verdict(core, ask()) == "unavailable"


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 5])
def test_a_full_disk_says_nothing_about_the_adapter(tmp_path, ask, num_steps):
    disk = SmallDisk(tmp_path / "journal")
    core = make_core(tmp_path, journal=make_journal(tmp_path, disk))
    assert core.handle("gw", ask()) == []
    for _ in range(num_steps):
        assert core.step() == []
    disk.fill()
    assert run(core)[0]["p1"][1].verdict == "unavailable"


def test_proofs_come_one_after_the_other_and_only_so_many_wait(tmp_path, ask):
    core = make_core(tmp_path)
    answers = [core.handle("gw", ask(f"p{i}")) for i in range(MAX_WAITING + 1)]
    assert answers[:-1] == [[]] * MAX_WAITING
    assert answers[-1][0][1].proof.verdict == "unavailable"
    proofs, _ = run(core, 5000)
    assert {proof.verdict for _, proof in proofs.values()} == {"passed"}
    assert list(proofs) == [f"p{i}" for i in range(MAX_WAITING)]
    assert proofs["p1"][1].cold_load_s is None, "the first proof loaded the adapter"


def test_a_proof_beside_others_changes_nothing_for_them(tmp_path, ask):
    core = make_core(tmp_path)
    messages = [make_message(f"r{i}", prompt_len=30, max_tokens=20) for i in range(8)]
    for message in messages[:4]:
        core.handle("gw", message)
    core.handle("gw", ask())
    for message in messages[4:]:
        core.handle("gw", message)
    proofs, outputs = run(core)
    assert proofs["p1"][1].verdict == "passed"
    for message in messages:
        assert tokens_of(outputs[message.request_id]) == expected_tokens(message)


class SlowReference(FakeReference):
    """A reference whose units take a second each."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock
        self.num_units = 10
        self.started_at = []

    def compare(self, sequences, object_path):
        for _ in range(self.num_units):
            self.started_at.append(self.clock.now)
            self.clock.now += 1.0
            yield
        return (yield from super().compare(sequences, object_path))


def test_merged_weights_take_a_tenth_of_the_time_while_somebody_is_served(tmp_path, ask):
    clock = FakeClock()
    core = make_core(tmp_path, make_scheduler(clock=clock))
    core.proofs.clock = clock
    reference = core.proofs.reference = SlowReference(clock)
    core.handle("gw", make_message("r1", max_tokens=200, deadline_s=1e9))
    core.handle("gw", ask())
    for _ in range(180):
        clock.now += 0.25
        core.step()
    assert core.scheduler.groups.keys() == {"r1"}, "a request runs all the time"
    gaps = [b - a for a, b in zip(reference.started_at, reference.started_at[1:], strict=False)]
    assert len(gaps) >= 3
    assert min(gaps) >= 10.0
    core.scheduler.abort(["r1"])
    left = 10 - len(reference.started_at)
    started_at = clock.now
    assert run(core)[0]["p1"][1].verdict == "passed"
    assert clock.now - started_at == left, "units run without pauses if no request runs"


def test_what_a_proof_generates_is_in_the_journal_under_its_own_name(tmp_path, ask):
    core = make_core(tmp_path)
    verdict(core, ask())
    records = core.journal.read(0, 100).records
    assert {record.tenant_id for record in records} == {PROOF_TENANT}
    assert sum(record.num_completion_tokens for record in records) == 2 * 1 + 2 * 4
    assert core.num_completion_tokens == 10


# ---- errors of ours ----


class BrokenReference(FakeReference):
    def compare(self, sequences, object_path):
        yield
        raise KeyError("a weight that is not there")


def test_an_error_of_the_proof_itself_ends_only_the_proof(tmp_path, ask):
    core, message = make_core(tmp_path), make_message("r", max_tokens=40)
    core.proofs.reference = BrokenReference()
    core.handle("gw", message)
    core.handle("gw", ask())
    proofs, outputs = run(core)
    assert proofs["p1"][1].verdict == "proof_failed"
    assert tokens_of(outputs["r"]) == expected_tokens(message)


def test_alone_it_waits_until_nobody_is_served_and_then_turns_others_away(tmp_path, ask):
    core = make_core(tmp_path)
    core.handle("gw", make_message("before", max_tokens=4))
    core.handle("gw", ask(alone=True))
    while "before" in core.scheduler.groups:
        assert not core.proofs.is_alone
        core.step()
    core.step()
    assert core.proofs.is_alone
    ((_, refused),) = core.handle("gw", make_message("meanwhile"))
    assert [output.error for output in refused.outputs] == [PROVING]
    proofs, _ = run(core)
    assert proofs["p1"][1].verdict == "passed"
    assert core.handle("gw", make_message("after")) == []


def test_alone_it_is_given_up_if_it_never_is(tmp_path, ask):
    clock = FakeClock()
    core = make_core(tmp_path, make_scheduler(clock=clock))
    core.handle("gw", make_message("r", max_tokens=100, deadline_s=900.0))
    core.handle("gw", ask(alone=True))
    core.step()
    clock.now += 301
    answers = [m for _, m in core.step() if isinstance(m, ProofResult)]
    assert [answer.proof.verdict for answer in answers] == ["unavailable"]
    assert not any(isinstance(m, ProofResult) for _, m in core.step())
