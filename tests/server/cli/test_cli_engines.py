"""`chorale engines`, called as an operator does."""

import json

from tests.server.fake_api import list_of

READY = {
    "object": "engine",
    "name": "engine",
    "machine": "m1",
    "seen_s": 0,
    "state": "ready",
    "engine_id": "eng-1",
    "starts": 2,
    "max_num_seqs": 64,
    "requests_here": 3,
    "figures": {"running": 5, "waiting": 7, "unsettled_records": 11},
}
AWAY = {
    **READY, "name": "engine-2", "state": "starting", "engine_id": None, "max_num_seqs": None,
    "figures": None,
}  # fmt: skip


SUSPECT = {
    "object": "engine.suspect", "fingerprint": "6f1c", "tenant_id": "ten_9", "base_model": "b",
    "state": "held", "deaths": 3, "expires_at": 1_798_761_600,
}  # fmt: skip
VOIDED = {"object": "engine.lost", "engine_id": "eng-9", "num_voided": 3, "num_open": 2}
PLACE = "/admin/v1/engines"
ANSWERS = {
    ("GET", PLACE): list_of(READY, AWAY),
    ("POST", f"{PLACE}/eng-9/lost"): (200, VOIDED),
    ("GET", f"{PLACE}/suspects"): list_of(SUSPECT),
    ("DELETE", f"{PLACE}/suspects/6f1c"): list_of(),
}


def test_an_engine_is_a_line_with_what_it_does(run):
    header, *lines = run("engines", "list").stdout.splitlines()
    assert header.split() == [
        "machine", "name", "state", "seen_s", "running", "waiting", "seats", "unsettled", "starts",
        "engine_id",
    ]  # fmt: skip
    assert lines[0].split() == ["m1", "engine", "ready", "0", "5", "7", "64", "11", "2", "eng-1"]
    assert lines[1].split() == ["m1", "engine-2", "starting", "0", "-", "-", "-", "-", "2", "-"]
    assert json.loads(run("engines", "list", "--json").stdout) == [READY, AWAY]


def test_what_was_voided_of_a_lost_engine_is_said_and_what_is_still_to_come(run):
    said = run("engines", "lost", "eng-9").stderr
    assert "3 holds of eng-9" in said
    assert "2 more have not expired" in said
    assert json.loads(run("engines", "lost", "eng-9", "--json").stdout) == VOIDED


def test_suspects_are_listed_and_cleared(run):
    header, line = run("engines", "suspects").stdout.splitlines()
    assert header.split()[:3] == ["fingerprint", "tenant_id", "base_model"]
    assert line.split() == ["6f1c", "ten_9", "b", "held", "3", "2027-01-01", "00:00:00Z"]
    assert json.loads(run("engines", "suspects", "--json").stdout) == [SUSPECT]
    assert "suspects no request" in run("engines", "suspects", "--clear", "6f1c").stderr


def test_no_engine_is_said(run, monkeypatch):
    monkeypatch.setitem(ANSWERS, ("GET", PLACE), list_of())
    result = run("engines", "list")
    assert result.exit_code == 0
    assert "no engine yet" in result.stderr
