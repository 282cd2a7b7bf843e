"""Faults of a gateway that answers, by what it says."""

import pytest

from server.cli.checks.check import Finding
from server.cli.checks.gateway import (
    check_audit,
    check_engines,
    check_journals,
    check_problems,
    check_ready,
    check_release,
    find_release,
    no_gateway,
)
from server.cli.figures import read_figures
from server.cli.terminal import CommandFailed
from server.version import VERSION, build
from tests.server.fake_api import fixed


@pytest.fixture
def serve(make_api):
    """A function of fixed answers to GET by path, which returns the URL."""

    def start(answers):
        return make_api(fixed({("GET", path): answer for path, answer in answers.items()})).url

    return start


def test_only_a_gateway_has_a_release(serve):
    answer = {"version": VERSION, "build": "0123"}
    assert find_release(serve({"/version": (200, answer)})) == f"{VERSION} (build 0123)"
    assert find_release(serve({"/version": (200, b"<html>")})) is None
    assert find_release("http://127.0.0.1:1") is None
    assert check_release(f"{VERSION} (build 0123)").verdict == "warning"
    assert check_release(f"{VERSION} (build {build()})").verdict == "ok"


def test_nobody_at_the_url_is_a_warning_once_the_server_was_started_and_wrong_if_named(tmp_path):
    assert no_gateway("http://here", tmp_path, is_named=False).verdict == "skipped"
    (tmp_path / "gateway.json").touch()
    assert no_gateway("http://here", tmp_path, is_named=False).verdict == "warning"
    assert no_gateway("http://here", tmp_path, is_named=True).verdict == "wrong"


def test_a_gateway_that_is_not_ready_is_wrong_by_each_part_that_is_missing(serve):
    parts = {"engine": False, "ledger": False, "serving": True}
    finding = check_ready(serve({"/ready": (503, parts)}))
    assert (finding.verdict, "engine, ledger" in finding.found) == ("wrong", True)
    assert check_ready(serve({"/ready": (200, dict.fromkeys(parts, True))})).verdict == "ok"


@pytest.mark.parametrize(
    ("state", "verdict"), [("ready", "ok"), ("starting", "warning"), ("silent", "wrong")]
)
def test_an_engine_that_is_away_is_named_with_its_state(serve, tmp_path, state, verdict):
    engine = {"name": "engine-2", "engine_id": "eng-2", "state": state}
    url = serve({"/admin/v1/engines": (200, {"data": [engine]})})
    finding = check_engines(url, "key", tmp_path)
    assert finding.verdict == verdict
    assert state == "ready" or "engine-2" in finding.found


@pytest.mark.parametrize("check", [check_engines, check_problems])
def test_without_the_admin_key_nothing_is_called_missing_or_wrong(tmp_path, check):
    assert check("http://127.0.0.1:1", None, tmp_path).verdict == "skipped"


def test_a_segment_that_was_set_aside_is_named(tmp_path):
    journal = tmp_path / "engine" / "journal"
    journal.mkdir(parents=True)
    (tmp_path / "engine" / "identity").touch()
    assert check_journals(tmp_path).verdict == "ok"
    (journal / "0001.journal.damaged").touch()
    finding = check_journals(tmp_path)
    assert (finding.verdict, "0001.journal.damaged" in finding.found) == ("warning", True)
    assert "chorale audit" in finding.todo


def test_each_problem_of_the_gateway_is_a_finding_with_what_to_do(serve, tmp_path):
    def check(problems):
        answer = {"data": [{"found": f"{it}.", "todo": f"Mend {it}."} for it in problems]}
        return check_problems(serve({"/admin/v1/problems": (200, answer)}), "key", tmp_path)

    assert check(["a", "b"]) == [
        Finding("wrong", "a.", "Mend a."),
        Finding("wrong", "b.", "Mend b."),
    ]
    assert check([]).verdict == "ok"


def test_a_gateway_that_refuses_to_tell_is_not_called_well(serve, tmp_path):
    refused = {"error": {"message": "The admin key is wrong."}}
    url = serve({"/admin/v1/problems": (401, refused)})
    with pytest.raises(CommandFailed, match="The admin key is wrong"):
        check_problems(url, "key", tmp_path)


def test_an_audit_is_well_for_three_hours(serve):
    name = "chorale_audit_last_success_timestamp_seconds"
    text = f'# TYPE {name} gauge\n{name}{{gateway="1"}} 0\n{name}{{gateway="2"}} 1000\n'
    url = serve({"/metrics": (200, text.encode())})
    assert check_audit(url, lambda: 11_800).verdict == "ok"
    assert check_audit(url, lambda: 11_801).verdict == "warning"
    assert check_audit(serve({"/metrics": (200, b"")})).verdict == "skipped"


def test_a_figure_is_the_largest_of_all_engines_and_none_without_the_metric():
    name = "chorale_settler_lag_records"
    found = read_figures(
        f'# TYPE {name} gauge\n{name}{{engine="engine"}} 7\n{name}{{engine="engine-2"}} 3\n'
    )
    assert found.get("settler lag") == 7
    assert found.get("engine deaths") is None
