"""A check ends in time, whatever it meets, and tells no password."""

import threading

import pytest

from registry.extras import ExtraMissing
from server.cli.checks.check import Check, Finding


def test_a_check_that_does_not_return_is_wrong_and_left_behind():
    never = threading.Event()
    (finding,) = Check("slow", never.wait, "Start it.").run(timeout_s=0.01)
    never.set()
    assert finding == Finding("wrong", "There was no answer for 0.01 s.", "Start it.")


@pytest.mark.parametrize("password", ["hunter2", "hunter/2", "hun@ter2"])
def test_what_a_part_raises_is_what_is_wrong_with_it_without_the_passwords_of_urls(password):
    def look():
        raise ValueError(f"redis://:{password}@here\nis not there")

    (finding,) = Check("Redis", look, "Start it.").run()
    assert finding == Finding("wrong", "redis://***@here is not there", "Start it.")


def test_a_package_that_is_missing_is_named_with_its_extra():
    def look():
        raise ExtraMissing("A test", "boto3")

    (finding,) = Check("store", look, "").run()
    assert (finding.verdict, "boto3" in finding.found) == ("wrong", True)
    assert "pip install -e '.[s3]'" in finding.todo
