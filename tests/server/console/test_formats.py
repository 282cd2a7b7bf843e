"""Figures as pages write them."""

import pytest

from server.console import formats


@pytest.mark.parametrize(
    ("nanousd", "text"),
    [
        (0, "$0.00"), (1, "$0.000000001"), (23_500, "$0.0000235"), (1_234_567, "$0.00123"),
        (999_999_999, "$1.000"), (10**9, "$1.00"), (1_234_567_890_000, "$1,234.57"),
        (-5 * 10**9, "−$5.00"), (-120_000, "−$0.000120"),
    ],
)  # fmt: skip
def test_dollars_show_what_a_request_costs_and_what_a_year_does(nanousd: int, text: str) -> None:
    assert formats.usd(nanousd) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [(None, "–"), (0, "0 ms"), (4.567, "4.57 ms"), (999, "999 ms"), (999.6, "1 s"),
     (1500, "1.5 s"), (119_000, "119 s"), (180_000, "3 min"), (7_200_000, "2 h")],
)  # fmt: skip
def test_a_span_has_the_unit_that_fits(ms: float | None, text: str) -> None:
    assert formats.span(ms) == text


def test_sizes_counts_moments_and_digests() -> None:
    sizes = [formats.size(size) for size in (0, 999, 206_000, 999_600, 5 * 10**9, 3 * 10**15)]
    assert sizes == ["0 B", "999 B", "206 kB", "1 MB", "5 GB", "3e+03 TB"]
    assert formats.count(1_234_567.0) == "1,234,567"
    assert formats.when(1_770_000_000_000) == "2026-02-02 02:40:00"
    assert (formats.when(None), formats.short(None)) == ("–", "–")
    assert formats.short("ab" * 32) == "abababababab"
