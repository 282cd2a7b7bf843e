"""The page on security has a row for every rule, and the tests that it names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "operator" / "security.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows() -> list[list[str]]:
    """Return the cells of every row with a number."""
    lines = PAGE.read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return [row for row in cells if row[0].isdecimal()]


def test_the_rules_are_numbered_from_1_without_gaps() -> None:
    assert [int(row[0]) for row in rows()] == list(range(1, len(rows()) + 1))
    assert all(len(row) == 4 and all(row) for row in rows())


def test_every_row_names_a_test_or_says_why_there_is_none() -> None:
    for number, _, how, shown in rows():
        if not NAMED.search(shown):
            assert shown == "none", number
            assert how.startswith("No test") or "Not there:" in how, number


def test_every_test_that_is_named_exists() -> None:
    named = NAMED.findall(PAGE.read_text())
    assert len(named) > 80
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), (
            f"{path}::{name}"
        )


# ---- rules about code that must not exist ----


def test_no_code_of_the_gateway_asks_for_an_address_made_from_the_host_header() -> None:
    for path in (ROOT / "server").rglob("*.py"):
        if path.parent.name not in ("client", "cli"):
            found = re.search(r"request\.(url|base_url)|url_for\(", path.read_text())
            assert not found, f"{path}: {found and found[0]}"


def test_there_is_no_parser_of_forms() -> None:
    for name in ("pyproject.toml", "constraints.txt"):
        assert "multipart" not in (ROOT / name).read_text().lower()
