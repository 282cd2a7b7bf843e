"""The lists of long tests name files that exist; other files count by their number of tests."""

from pathlib import Path

from tests.order import FOLDERS_ALONE, SECONDS, STARTING, is_fast, scope_of, seconds

ROOT = Path(__file__).parents[1]


def test_every_file_and_folder_that_is_named_exists():
    named = {*FOLDERS_ALONE, *SECONDS, *STARTING}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_a_worker_keeps_a_file_or_a_folder_alone_to_itself():
    assert scope_of("tests/lora/test_arena.py::test_a") == "tests/lora/test_arena.py"
    assert scope_of("tests/e2e/test_page.py::test_a[1-2]") == "tests/e2e"


def test_what_is_named_takes_as_long_as_it_is_said_and_the_rest_by_its_tests():
    assert seconds("tests/e2e", ["one"]) == SECONDS["tests/e2e"]
    assert seconds("tests/some.py", ["one"] * 7) > seconds("tests/some.py", ["one"])


def test_what_is_long_or_starts_something_is_not_fast():
    assert not is_fast("tests/e2e")
    assert not any(map(is_fast, STARTING))
    assert is_fast("tests/test_order.py")
