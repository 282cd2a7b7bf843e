"""A full disk: tokens leave only once written, every start gets its end, and service resumes."""

import errno
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.journal.journal import END_RECORD_BYTES
from engine.journal.lines import encode, read_records
from engine.journal.state import output_sha256
from engine.steps.batch import StepResult
from engine.wire.records import EndRecord, StartRecord
from tests.engine.fakes import FakeClock, make_core, make_message, run_until_idle
from tests.engine.small_disk import Killed, SmallDisk, make_journal


@pytest.fixture
def disk(tmp_path):
    return SmallDisk(tmp_path / "journal")


def make_full_core(directory, disk, clock=None, **limits):
    return make_core(directory, journal=make_journal(directory, disk, clock), **limits)


def step(core):
    return [o for _, message in core.step() for o in message.outputs]


def ends_of(directory):
    return [r for r in read_records(directory / "journal") if isinstance(r, EndRecord)]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_every_request_ends_at_what_left_and_is_told_so_at_once(tmp_path, disk, error, lag):
    disk.error = error
    core = make_full_core(tmp_path, disk, max_num_seqs=2, lag=lag)
    for name in ("runs", "runs-too", "waits"):
        core.handle("gw", make_message(name, max_tokens=50))
    received = [o for _ in range(5) for o in step(core)]
    core.handle("gw", make_message("too-late"))
    disk.fill(but=100)  # some bytes of the next step fit
    failed = {output.request_id: output for output in step(core)}
    assert all(o.finish_reason == "error" and o.is_last for o in failed.values())
    assert not any(output.new_token_ids for output in failed.values())
    for name in ("runs", "runs-too", "waits"):
        before = [o for o in received if o.request_id == name]
        assert (failed[name].seq, failed[name].stop_cause) == (len(before), "engine_failure")
    # It was accepted but is not in the journal, so its hold can be voided at once.
    late = failed["too-late"]
    assert (late.seq, late.stop_cause, late.error) == (0, None, "metering_unavailable")
    ends = {end.request_id: end for end in ends_of(tmp_path)}
    assert ends.keys() == {"runs", "runs-too", "waits"}
    for name, end in ends.items():
        tokens = [t for o in received if o.request_id == name for t in o.new_token_ids]
        assert end.stop_cause == "engine_failure"
        assert (end.num_completion_tokens, end.output_sha256) == (
            len(tokens),
            output_sha256(tokens),
        )
    assert core.journal.read(0, 10).records == tuple(ends.values())
    core.scheduler.check_integrity()


def test_it_refuses_until_the_reserve_can_be_allocated_and_then_serves_by_itself(tmp_path, disk):
    clock = FakeClock()
    core = make_full_core(tmp_path, disk, clock)
    core.handle("gw", make_message("before", max_tokens=50))
    step(core)
    disk.fill()
    step(core)
    for _ in range(3):
        clock.now += 10
        step(core)
        ((_, refused),) = core.handle("gw", make_message("refused"))
        assert refused.outputs[0].error == "metering_unavailable"
    disk.capacity += 1 << 21
    clock.now += 10
    step(core)
    assert core.handle("gw", make_message("after")) == []
    assert run_until_idle(core)["after"][-1].finish_reason == "length"
    assert [end.request_id for end in ends_of(tmp_path)] == ["before", "after"]


def test_room_is_asked_for_at_most_once_a_second(tmp_path, disk):
    clock = FakeClock()
    core = make_full_core(tmp_path, disk, clock)
    core.handle("gw", make_message())
    step(core)
    disk.fill()
    step(core)
    num_allocations = disk.num_allocations
    for _ in range(20):
        clock.now += 0.25
        step(core)
    assert disk.num_allocations - num_allocations == 5


def test_an_engine_that_dies_on_a_full_disk_finds_the_reserve_when_it_starts(tmp_path, disk):
    core = make_full_core(tmp_path, disk)
    core.handle("gw", make_message(max_tokens=50))
    step(core)
    disk.fill()  # the engine is killed here
    again = make_journal(tmp_path, disk)
    (end,) = again.read(0, 10).records
    assert (end.stop_cause, end.num_completion_tokens) == ("engine_failure", 1)
    assert again.is_full


def test_without_reserve_or_room_an_engine_starts_and_refuses_and_owes_the_ends(tmp_path, disk):
    core = make_full_core(tmp_path, disk)
    core.handle("gw", make_message("owed", max_tokens=50))
    step(core)
    (tmp_path / "journal" / "reserve").unlink()
    disk.fill()
    clock = FakeClock()
    core = make_full_core(tmp_path, disk, clock)
    found = core.journal.read(0, 10)
    # The request stays open, so that its hold is not voided.
    assert (found.records, found.open_request_ids) == ((), ("owed",))
    ((_, refused),) = core.handle("gw", make_message("new"))
    assert refused.outputs[0].error == "metering_unavailable"
    disk.capacity += 1 << 22
    clock.now += 1
    step(core)
    found = core.journal.read(0, 10)
    assert ([end.request_id for end in found.records], found.open_request_ids) == (["owed"], ())
    assert core.handle("gw", make_message("new")) == []


def test_a_new_engine_without_any_room_starts_and_refuses(tmp_path, disk):
    (tmp_path / "journal").mkdir()
    disk.fill()
    core = make_full_core(tmp_path, disk)
    ((_, refused),) = core.handle("gw", make_message())
    assert refused.outputs[0].error == "metering_unavailable"
    assert core.journal.read(0, 10).complete


def test_the_reserve_holds_the_end_of_every_request_that_may_be_open(tmp_path, disk):
    limits = {"max_num_seqs": 64, "max_waiting": 1024, "max_num_batched_tokens": 1024}
    core = make_full_core(tmp_path, disk, **limits)
    for i in range(1088):
        core.handle("gw", make_message(f"chatcmpl-{i:032x}", tenant_id="t" * 40))
        if i == 63:
            step(core)  # 64 requests run; 1,024 may wait
    core.journal.commit(StepResult(0))
    # The aborted request's seat is free, but its end is still to be written.
    core.scheduler.abort([f"chatcmpl-{0:032x}"])
    ((_, refused),) = core.handle("gw", make_message("one-more"))
    assert refused.outputs[0].error == "metering_unavailable"
    disk.fill()
    assert len(step(core)) == 1088
    assert len(ends_of(tmp_path)) == 1088
    assert max(map(len, map(encode, ends_of(tmp_path)))) < END_RECORD_BYTES


def test_a_fault_that_is_no_full_disk_kills_the_engine(tmp_path, disk):
    core = make_full_core(tmp_path, disk)
    core.handle("gw", make_message(max_tokens=50))
    step(core)
    disk.error = errno.EROFS
    disk.fill()
    with pytest.raises(OSError, match="Read-only"):
        core.step()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 6)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 5)),
    ),
    min_size=4,
    max_size=30,
)


@given(
    ACTIONS,
    st.integers(0, 3000),
    st.sampled_from([errno.ENOSPC, errno.EDQUOT, errno.EIO]),
    st.one_of(st.none(), st.integers(0, 40)),
    st.integers(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_whatever_byte_does_not_fit_starts_have_ends_and_counts_are_what_left(
    tmp_path_factory, actions, room, error, calls, lag
):
    directory = tmp_path_factory.mktemp("engine")
    disk = SmallDisk(directory / "journal", error)
    journal = make_journal(directory, disk, segment_bytes=1500)
    core = make_core(directory, journal=journal, lag=lag, max_num_seqs=3)
    disk.fill(but=room)
    if calls is not None:
        disk.calls_left = calls
    received: dict[str, int] = {}
    over = set()
    try:
        for number, (action, value) in enumerate([*actions, ("step", 40)]):
            if action == "add":
                message = make_message(f"r{number}", max_tokens=value)
                if core.handle("gw", message) == []:
                    received[message.request_id] = 0
            elif action == "abort":
                core.scheduler.abort([f"r{value}"])
            for _ in range(value if action == "step" else 0):
                for output in step(core):
                    assert output.request_id not in over, "an output after the last one"
                    received[output.request_id] += len(output.new_token_ids)
                    if output.is_last:
                        over.add(output.request_id)
        assert over == received.keys()
        assert core.journal.read(0, 0).open_request_ids == ()
    except Killed:
        pass
    make_journal(directory)
    records = list(read_records(directory / "journal"))
    starts = [r.request_id for r in records if isinstance(r, StartRecord)]
    ends = [r for r in records if isinstance(r, EndRecord)]
    assert sorted(starts) == sorted(end.request_id for end in ends)
    for end in ends:
        assert received[end.request_id] <= end.num_completion_tokens <= received[end.request_id] + 1
    assert all(received[name] == 0 for name in received.keys() - set(starts))
    assert [end.number for end in ends] == list(range(1, len(ends) + 1))


def can_mount():
    command = ["unshare", "--user", "--map-root-user", "--mount", "true"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not can_mount(), reason="mounting a tmpfs needs privileges here")
def test_on_a_real_file_system_that_is_full_the_same_happens(tmp_path):
    """The engine runs on a tmpfs of 4 MiB, filled to the last page, in a mount namespace."""
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-m"]
    run = subprocess.run(
        [*command, "tests.engine.full_tmpfs", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["failed"] == [["r1", "engine_failure"]]
    assert result["counted"] == result["received"] > 0
    assert result["refused"] == "metering_unavailable"
    assert result["restarted_full"] is True
    assert result["served_again"] == "max_tokens"
