"""The state machine of an adapter's residency: one table of what each event does in each state.

A state says where the adapter's weights are. An event is a wish (of requests, pins or prefetches),
a report of the loader, or a decision about room. `lora.residency` carries out the effects, in the
order of the row and after the change of state.
"""

from collections.abc import Mapping
from typing import Literal

from lora.tiers import Tier

State = Tier | Literal["reading"]
"""An adapter that is being read, or whose header is, is still in the tier "disk"."""

Event = Literal[
    "wanted", "prefetched", "unwanted", "retried",
    "begun", "fetched", "dropped", "read", "placed", "lost", "failed",
    "displaced", "given_slabs", "evicted", "evicted_to_host",
]  # fmt: skip
"""Wishes: wanted by a request or a pin; prefetched; unwanted by all of them from now on; retried
because something wants the adapter and its failure is long enough ago.
The loader: begun, its turn has come to be fetched or read; fetched to disk; dropped, a fetch that
nothing wanted; read; placed, the copy into the arena is done; lost, its packed file is missing or
damaged; failed.
Room: displaced from host memory; given slabs of the arena; evicted from the arena, without a copy
in host memory or with one.
"""

Effect = Literal[
    "line_up", "leave_line", "fetch", "drop_fetch", "expect_copy", "read", "copy",
    "free_slabs", "free_copy", "end_prefetch",
]  # fmt: skip
"""line_up: wait for the next fetch or read, if anything wants the adapter.   copy: into its slabs.
expect_copy: reserve host memory.   free_copy: free it.   free_slabs: give back those of the arena.
"""

Table = Mapping[tuple[State, Event], tuple[State, tuple[Effect, ...]]]

# fmt: off
DEVICE_TABLE: Table = {
    ("remote",   "wanted"):          ("remote",   ("line_up",)),
    ("remote",   "prefetched"):      ("remote",   ("line_up",)),
    ("remote",   "unwanted"):        ("remote",   ("leave_line",)),
    ("remote",   "begun"):           ("fetching", ("fetch",)),
    ("fetching", "unwanted"):        ("fetching", ("drop_fetch",)),
    ("fetching", "dropped"):         ("remote",   ("line_up",)),
    ("fetching", "fetched"):         ("disk",     ("line_up",)),
    ("fetching", "failed"):          ("failed",   ("end_prefetch",)),
    ("disk",     "wanted"):          ("disk",     ("line_up",)),
    ("disk",     "prefetched"):      ("disk",     ("line_up",)),
    ("disk",     "unwanted"):        ("disk",     ("leave_line",)),
    ("disk",     "begun"):           ("reading",  ("expect_copy", "read")),
    ("reading",  "read"):            ("host",     ("end_prefetch",)),
    ("reading",  "lost"):            ("remote",   ("end_prefetch", "free_copy", "line_up")),
    ("reading",  "failed"):          ("failed",   ("end_prefetch", "free_copy")),
    ("host",     "displaced"):       ("remote",   ("free_copy", "line_up")),
    ("host",     "given_slabs"):     ("loading",  ("copy",)),
    ("loading",  "placed"):          ("device",   ()),
    ("loading",  "lost"):            ("remote",   ("free_slabs", "free_copy", "line_up")),
    ("loading",  "failed"):          ("failed",   ("free_slabs", "free_copy")),
    ("device",   "displaced"):       ("device",   ("free_copy",)),
    ("device",   "evicted"):         ("remote",   ("free_slabs", "line_up")),
    ("device",   "evicted_to_host"): ("host",     ("free_slabs",)),
    ("failed",   "retried"):         ("remote",   ("line_up",)),
}
"""The table for an arena on a device. A wish without a row changes nothing; any other event without
a row is a bug.
"""

HOST_TABLE: Table = {
    **DEVICE_TABLE,
    # The disk is the last tier before the arena.
    ("fetching", "fetched"):         ("disk",     ("end_prefetch", "line_up")),
    # The fetcher checks that the file still exists.
    ("disk",     "prefetched"):      ("remote",   ("line_up",)),
    # The copy is only a header, whose file may be evicted.
    ("host",     "unwanted"):        ("remote",   ("free_copy",)),
    ("loading",  "placed"):          ("device",   ("free_copy",)),
}
"""The table for an arena in host memory (CPU), where an adapter has no second copy."""
# fmt: on
