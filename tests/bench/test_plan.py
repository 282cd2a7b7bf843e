"""Rows of plans: medians of both sides, and what the committed rows show."""

import pytest

from bench.page import FOLDER, read_rows
from bench.plan import SERVED, _result, cases


def test_a_row_has_the_medians_of_both_sides_and_their_ratio() -> None:
    rounds = [({"speed": p}, {"speed": m}) for p, m in ((9.0, 10.0), (12.0, 10.0), (10.0, 30.0))]
    result = _result(rounds)
    assert result == {
        "speed": {"predicted": 10.0, "measured": 10.0, "ratio": 1.0},
        "within": True,
    }
    assert _result([({"speed": 1.3}, {"speed": 1.0})])["within"] is False


def test_the_committed_rows_are_those_of_the_benchmark() -> None:
    rows = [row for row in read_rows(FOLDER / "results") if row["bench"].startswith("plan.")]
    assert len(rows) <= len(list(cases())) + len(SERVED)
    for row in rows:
        figures = [value for name, value in row["result"].items() if name != "within"]
        for figure in figures:
            expected = figure["predicted"] / figure["measured"]
            assert figure["ratio"] == pytest.approx(expected, rel=1e-3)
        assert row["result"]["within"] is all(0.8 <= f["ratio"] <= 1.25 for f in figures)
    assert sum(row["result"]["within"] for row in rows) >= 12
