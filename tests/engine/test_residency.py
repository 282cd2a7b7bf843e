"""The journal records where adapters were resident, at intervals and at exit, without loss."""

from engine.journal.lines import read_records
from engine.wire.records import EndRecord, ResidencyRecord
from tests.engine.fakes import (
    FakeClock,
    FakeLoader,
    make_adapter,
    make_core,
    make_message,
    make_scheduler,
    run_until_idle,
)
from tests.engine.small_disk import SmallDisk, make_journal


def make_metered_core(directory, disk=None, loader=None):
    """A core that writes residency once a minute; its scheduler and journal share a clock."""
    clock = FakeClock()
    scheduler = make_scheduler(clock=clock, loader=loader)
    journal = make_journal(directory, disk, clock)
    core = make_core(directory, scheduler, journal=journal, residency_interval_s=60)
    return core, clock


def serve(core, adapter, request_id="r1"):
    core.handle("gw", make_message(request_id, adapter=adapter))
    run_until_idle(core)


def residencies(core):
    return [r for r in core.journal.read(0, 100).records if isinstance(r, ResidencyRecord)]


def test_a_record_says_whose_adapter_was_where_for_how_long(tmp_path):
    loader, adapter = FakeLoader(), make_adapter()
    loader.slabs[adapter.object_key] = 3
    core, clock = make_metered_core(tmp_path, loader=loader)
    started_at = clock.now
    clock.now += 10
    serve(core, adapter)
    clock.now += 50
    core.step()
    (record,) = residencies(core)
    assert (record.started_at, record.at) == (started_at, started_at + 60)
    (item,) = record.items
    assert (item.object_key, item.adapter_id) == (adapter.object_key, adapter.adapter_id)
    assert (item.version, item.digest) == (adapter.version, adapter.digest)
    assert (item.tier, item.slabs, item.duration_ms, item.is_pinned) == ("device", 3, 50_000, False)
    assert item.size_bytes == core.adapters.entries[adapter.object_key].packed_bytes


def test_nothing_is_written_while_nothing_is_resident(tmp_path):
    core, clock = make_metered_core(tmp_path)
    for _ in range(5):
        clock.now += 60
        core.step()
    assert core.journal.last_seq == 0


def test_a_long_list_comes_as_several_records(tmp_path):
    core, clock = make_metered_core(tmp_path)
    serve(core, make_adapter())
    clock.now += 60
    core.step()
    (record,) = residencies(core)
    core.journal.note_residency(clock.now, record.items * 150)
    core.step()
    assert [len(record.items) for record in residencies(core)] == [1, 64, 64, 22]


def test_at_the_limit_of_unsettled_records_residency_adds_up_and_is_written_later(tmp_path):
    core, clock = make_metered_core(tmp_path)
    serve(core, make_adapter())
    core.max_unsettled = 3
    for _ in range(9):
        clock.now += 60
        core.step()
    assert core.journal.num_unsettled == 3
    ((_, refused),) = core.handle("gw", make_message("new"))
    assert refused.outputs[0].error == "metering_unavailable"
    core.journal.read(core.journal.last_seq, 10)
    core.step()
    (late,) = residencies(core)
    assert (late.at - late.started_at, late.items[0].duration_ms) == (7 * 60, 7 * 60_000)
    assert core.handle("gw", make_message("new")) == []


def test_a_clean_exit_writes_what_was_not_due_yet(tmp_path):
    core, clock = make_metered_core(tmp_path)
    serve(core, make_adapter())
    clock.now += 7
    core.close()
    *_, record = make_journal(tmp_path).read(0, 10).records
    assert record.items[0].duration_ms == 7_000


def test_a_full_disk_loses_no_residency(tmp_path):
    disk = SmallDisk(tmp_path / "journal")
    core, clock = make_metered_core(tmp_path, disk)
    serve(core, make_adapter())
    core.handle("gw", make_message("running", max_tokens=50))
    core.step()
    disk.fill()
    for _ in range(5):
        clock.now += 60
        core.step()
    assert residencies(core) == []
    disk.capacity += 1 << 22
    for _ in range(2):
        clock.now += 60
        core.step()
    found = [r for r in read_records(tmp_path / "journal") if isinstance(r, ResidencyRecord)]
    assert tuple(found) == tuple(residencies(core))
    assert sum(item.duration_ms for record in found for item in record.items) == 7 * 60_000
    assert [r.seq for r in core.journal.read(0, 10).records] == sorted(
        r.seq
        for r in read_records(tmp_path / "journal")
        if isinstance(r, EndRecord | ResidencyRecord)
    )
