"""The table of states and events, row by row, and that the documents show it as it is."""

from pathlib import Path

import pytest

from lora.transitions import DEVICE_TABLE, HOST_TABLE

PAGE = Path(__file__).parents[2] / "docs" / "developer" / "adapter-memory.md"
EVENTS = {
    "remote": {"wanted", "prefetched", "unwanted", "begun"},
    "fetching": {"unwanted", "fetched", "dropped", "failed"},
    "disk": {"wanted", "prefetched", "unwanted", "begun"},
    "reading": {"read", "lost", "failed"},
    "host": {"displaced", "given_slabs"},
    "loading": {"placed", "lost", "failed"},
    "device": {"displaced", "evicted", "evicted_to_host"},
    "failed": {"retried"},
}


@pytest.fixture(params=[HOST_TABLE, DEVICE_TABLE], ids=["host", "device"])
def rows(request):
    """(state, event, next state, effects) of every row of a table."""
    return [(*key, *change) for key, change in request.param.items()]


def test_every_event_that_a_state_can_meet_is_answered(rows):
    for state, events in EVENTS.items():
        assert {event for s, event, *_ in rows if s == state} - events <= {"unwanted"}
        assert events <= {event for s, event, *_ in rows if s == state}


def test_whoever_can_be_moved_and_is_wanted_waits_in_line(rows):
    for state, event, after, effects in rows:
        may_wait = after in ("remote", "disk") and event != "unwanted"
        assert ("line_up" in effects) == may_wait
        assert ("leave_line" in effects) == (event == "unwanted" and after == state != "fetching")


def test_slabs_and_host_memory_are_freed_exactly_when_their_states_are_left(rows):
    """An adapter has slabs while it is loading or in the arena, and, on its way, a copy."""
    for state, event, after, effects in rows:
        leaves_arena = state in ("loading", "device") and after not in ("loading", "device")
        assert ("free_slabs" in effects) == leaves_arena
        ways = ("reading", "host", "loading")
        loses_copy = state in ways and after not in (*ways, "device")
        is_second = event == "displaced" or (event == "placed" and rows_of_host(rows))
        assert ("free_copy" in effects) == (loses_copy or is_second)
        assert ("expect_copy" in effects) == (after == "reading")


def rows_of_host(rows):
    return ("host", "unwanted") in {row[:2] for row in rows}


def test_a_prefetch_ends_where_its_way_ends(rows):
    last = "disk" if rows_of_host(rows) else "host"
    for state, event, after, effects in rows:
        is_there = (state, event) in (("fetching", "fetched"), ("reading", "read"))
        is_over = state in ("fetching", "reading") and (after == "failed" or event == "lost")
        is_at_last = is_there and after in (last, "host")
        assert ("end_prefetch" in effects) == (is_over or is_at_last)


def test_on_a_host_what_nobody_wants_keeps_no_header_and_a_prefetch_looks_for_its_file():
    """The file of an adapter that nobody wants may be evicted from the disk."""
    assert HOST_TABLE["host", "unwanted"] == ("remote", ("free_copy",))
    assert HOST_TABLE["disk", "prefetched"] == ("remote", ("line_up",))


def test_the_documents_show_both_tables():
    def shown(table, keys):
        for state, event in keys:
            after, effects = table[state, event]
            yield f"| {state} | {event} | {after} | {', '.join(effects)} |"

    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("| ")]
    differing = [key for key in HOST_TABLE if HOST_TABLE[key] != DEVICE_TABLE.get(key)]
    assert [row for row in rows if not row.startswith("| state |")] == [
        *shown(DEVICE_TABLE, DEVICE_TABLE),
        *shown(HOST_TABLE, differing),
    ]
