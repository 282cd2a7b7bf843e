"""The table of states and events: no state is a dead end, and the documents show it as it is."""

from pathlib import Path

import pytest

from lora.transitions import DEVICE_TABLE, HOST_TABLE

PAGE = Path(__file__).parents[2] / "docs" / "developer" / "adapter-memory.md"
TABLES = pytest.mark.parametrize("table", [HOST_TABLE, DEVICE_TABLE], ids=["host", "device"])


def line(table, key):
    state, event = key
    after, effects = table[key]
    return f"| {state} | {event} | {after} | {', '.join(effects)} |"


def test_the_documents_show_both_tables():
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("| ")]
    shown = [row for row in rows if not row.startswith("| state |")]
    differing = [key for key in HOST_TABLE if HOST_TABLE[key] != DEVICE_TABLE.get(key)]
    assert shown == [
        *(line(DEVICE_TABLE, key) for key in DEVICE_TABLE),
        *(line(HOST_TABLE, key) for key in differing),
    ]


@TABLES
def test_the_arena_can_be_reached_from_every_state(table):
    states = {state for state, _ in table}
    reached = {"device"}
    for _ in states:
        reached |= {state for (state, _), (after, _) in table.items() if after in reached}
    assert reached == states == {after for after, _ in table.values()}


@TABLES
def test_slabs_and_copies_are_freed_exactly_when_their_states_are_left(table):
    """An adapter has slabs while it is loading or in the arena, and a copy to load it from."""
    for (state, _), (after, effects) in table.items():
        leaves_arena = state in ("loading", "device") and after not in ("loading", "device")
        assert ("free_slabs" in effects) == leaves_arena
        loses_copy = state in ("host", "loading") and after in ("remote", "failed")
        assert "free_copy" in effects or not loses_copy
