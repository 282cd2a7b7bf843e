"""Faults of a gateway that answers, by what it says."""

import pytest

from server.cli.checks.gateway import (
    BOUNDS,
    check_audit,
    check_bound,
    check_engines,
    check_journals,
    check_ready,
    check_release,
    find_release,
    get_figures,
    no_gateway,
)
from server.cli.figures import NAMES, Figures
from tests.server.fake_api import Api, fixed


@pytest.fixture
def serve():
    """A function of fixed answers to GET by path, which returns the URL."""
    apis = []

    def start(answers):
        apis.append(Api(fixed({("GET", path): answer for path, answer in answers.items()})))
        return apis[-1].url

    yield start
    for api in apis:
        api.close()


def test_only_a_gateway_has_a_release(serve):
    assert find_release(serve({"/version": (200, {"version": "0.0.1"})})) == "0.0.1"
    assert find_release(serve({"/version": (200, b"<html>")})) is None
    assert find_release("http://127.0.0.1:1") is None
    assert check_release("0.0.1").verdict == "warning"


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


def test_without_the_admin_key_engines_are_not_called_missing(tmp_path):
    assert check_engines("http://127.0.0.1:1", None, tmp_path).verdict == "skipped"


def test_a_segment_that_was_set_aside_is_named(tmp_path):
    journal = tmp_path / "engine" / "journal"
    journal.mkdir(parents=True)
    (tmp_path / "engine" / "identity").touch()
    assert check_journals(tmp_path).verdict == "ok"
    (journal / "0001.journal.damaged").touch()
    finding = check_journals(tmp_path)
    assert (finding.verdict, "0001.journal.damaged" in finding.found) == ("warning", True)
    assert "chorale audit" in finding.todo


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: bound.name)
def test_a_figure_past_its_bound_is_told_with_what_to_do(bound):
    def figures(value):
        return lambda: Figures({NAMES[bound.word]: [0.0, value]})

    assert check_bound(figures(bound.most), bound).verdict == "ok"
    finding = check_bound(figures(bound.most + 1), bound)
    assert (finding.verdict, finding.todo) == (bound.verdict, bound.todo)
    assert f"{bound.most + 1:,.0f}" in finding.found


def test_a_figure_that_the_gateway_does_not_have_is_not_called_well():
    assert {check_bound(Figures, bound).verdict for bound in BOUNDS} == {"skipped"}
    assert check_audit(Figures).verdict == "skipped"


def test_an_audit_is_well_for_three_hours():
    def figures():
        return Figures({NAMES["audited at"]: [0.0, 1000.0]})

    assert check_audit(figures, lambda: 11_800).verdict == "ok"
    assert check_audit(figures, lambda: 11_801).verdict == "warning"


def test_a_figure_is_the_largest_of_all_engines_and_none_without_the_metric(serve):
    text = (
        "# TYPE chorale_unsettled_records gauge\n"
        'chorale_unsettled_records{engine="engine"} 3\n'
        'chorale_unsettled_records{engine="engine-2"} 7\n'
    )
    found = get_figures(serve({"/metrics": (200, text.encode())}))
    assert found.get("unsettled") == 7
    assert found.get("settler lag") is None
