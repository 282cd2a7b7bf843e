"""The page of benchmarks says what the newest rows say."""

from pathlib import Path

import pytest

from bench import page

ROWS = [
    {"bench": "flight", "setup": {"wings": 2}, "result": {"speed": 1}},
    {"bench": "flight", "setup": {"wings": 4}, "result": {"speed": 2}},
    {"bench": "flight", "setup": {"wings": 2}, "result": {"speed": 3}},
]


def test_the_newest_row_with_a_setup_counts() -> None:
    assert page.result(ROWS, "flight", {"wings": 2}) == {"speed": 3}
    assert page.result(ROWS, "flight", {"wings": 4}) == {"speed": 2}


def test_a_figure_that_no_row_has_is_an_error() -> None:
    with pytest.raises(LookupError, match="no row of flight"):
        page.result(ROWS, "flight", {"wings": 6})
    with pytest.raises(LookupError):
        page.render(ROWS)


@pytest.mark.parametrize(
    ("number", "digits", "text"),
    [
        (106.1, 3, "106"),
        (99.96, 3, "100"),
        (37.4, 3, "37.4"),
        (5793.0, 4, "5,793"),
        (0.06273, 2, "0.063"),
        (4.0, 2, "4.0"),
    ],
)
def test_figures_have_significant_digits(number: float, digits: int, text: str) -> None:
    assert page.significant(number, digits) == text


def test_the_check_fails_where_a_row_is_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.md"
    assert page.main(["--check"], path) == 1
    assert "make reference" in capsys.readouterr().err
    assert page.main([], path) == 0
    assert page.main(["--check"], path) == 0
