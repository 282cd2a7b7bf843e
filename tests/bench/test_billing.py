"""Each measurement of billing at a tiny size: it gives figures, and ratios fit the figures."""

import json

import pytest

from bench.billing.__main__ import row
from bench.billing.disk import Disk
from bench.billing.final_chunk import FinalChunk
from bench.billing.reading import Reading
from bench.billing.settles import Settles
from server.billing.exports.formats import FORMATS


def measure(measurement):
    return json.loads(row("test", measurement))["result"]


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.soak)])
def test_requests_are_settled_durably_beside_inserting_the_same_rows(database):
    bench = Settles(requests=70, warm_up=5, writers=7, group_size=32, databases=(database,))
    plain, late = measure(bench).values()
    for figures in (plain, late):
        both = figures["settled_per_s"] / figures["insert_only_per_s"]
        assert figures["share_of_insert_only"] == pytest.approx(both, rel=1e-2)
        assert figures["settled_per_s"] < min(figures["holds_per_s"], figures["posts_per_s"])
    # There are at least ten groups of holds, and three groups of ends.
    assert 70 / late["settled_per_s"] > 13 * 0.005


def test_a_step_with_an_end_is_measured_beside_one_without():
    result = measure(FinalChunk(running=3, steps=5))
    with_end, without = result["step_with_end_ms"]["p50"], result["step_without_end_ms"]["p50"]
    assert with_end > without > 0


def test_every_format_the_audit_and_the_verification_read_every_entry():
    result = measure(Reading(entries=130, tenants=3))
    assert set(result["exports"]) == {*FORMATS}
    assert min(figures["rows_per_s"] for figures in result["exports"].values()) > 0
    assert result["audited"] == 130
    assert result["audit_s_per_million"] > 0
    assert result["verified_receipts_per_s"] > 0


def test_a_disk_says_how_long_a_write_takes_to_be_safe():
    figures = measure(Disk(writes=3))["fdatasync_ms"]
    assert 0 < figures["p50"] <= figures["p99"]
