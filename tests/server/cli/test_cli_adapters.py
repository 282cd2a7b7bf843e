import json
import os
import subprocess
import sys

import pytest

from tests.server.fake_api import is_one_line, list_of
from tests.server.fake_uploads import version_of

PIN = {
    "since": 1_750_000_000,
    "version": 2,
    "size_bytes": 3_100_000,
    "price_nanousd_per_hour": 1550,
}
ADAPTER = {
    "id": "json",
    "created_at": 1_750_000_000,
    "aliases": {"latest": 2, "prod": 1},
    "canaries": {"prod": {"version": 2, "percent": 10}},
    "pin": PIN,
    "latest": version_of(2),
}
EMPTY = {**ADAPTER, "id": "empty", "aliases": {}, "canaries": {}, "pin": None, "latest": None}
GRANT = {"tenant": "globex", "tenant_id": "ten_2", "status": "accepted"}
OFFERED = {"tenant": "nobody", "tenant_id": None, "status": "offered"}
OFFER = {
    "model": "acme/support",
    "status": "offered",
    "expires_at": 1_750_000_000,
    "rank": 16,
    "size_bytes": 8_716_288,
    "prompt_nanousd": 150,
    "completion_nanousd": 600,
}
ACCEPTED = {
    **OFFER, "model": "initech/customer-support", "status": "accepted", "expires_at": None,
    "rank": None, "size_bytes": None,
}  # fmt: skip
MOVES = [
    {"id": 9, "version": 1, "canary": ADAPTER["canaries"]["prod"], "moved_at": 1_750_000_060,
     "moved_by": "key:k1"},
    {"id": 4, "version": None, "canary": None, "moved_at": 1_750_000_000, "moved_by": "key:k2"},
]  # fmt: skip


ANSWERS = {
    ("GET", "/v1/adapters"): list_of(EMPTY, ADAPTER),
    ("GET", "/v1/adapters/json"): (200, ADAPTER),
    ("GET", "/v1/adapters/json/grants"): list_of(GRANT, OFFERED),
    ("GET", "/v1/adapters/json/versions"): list_of(version_of(2), version_of(1)),
    ("GET", "/v1/adapters/json/aliases/prod/moves"): list_of(*MOVES),
    ("PUT", "/v1/adapters/json/aliases/prod"): (200, ADAPTER),
    ("POST", "/v1/adapters/json/aliases/prod/rollback"): (200, {**ADAPTER, "canaries": {}}),
    ("POST", "/v1/adapters/json/aliases/latest/rollback"): (200, ADAPTER),
    ("PUT", "/v1/adapters/json/pin"): (200, {"id": "json", **PIN}),
    ("DELETE", "/v1/adapters/json/pin"): (200, {"id": "json", "removed": True}),
    ("PUT", "/v1/adapters/json/grants/ten_2"): (200, GRANT),
    ("PUT", "/v1/adapters/json/grants/nobody"): (200, OFFERED),
    ("GET", "/v1/offers"): list_of(OFFER, ACCEPTED),
    ("PUT", "/v1/offers/acme/support"): (200, {"accepted": True}),
    ("DELETE", "/v1/offers/acme/support"): (200, {"declined": True}),
    ("DELETE", "/v1/adapters/json/grants/ten_2"): (200, {**GRANT, "revoked": True}),
    ("DELETE", "/v1/adapters/json"): (200, {"deleted": True}),
    ("DELETE", "/v1/adapters/json/versions/1"): (200, {"deleted": True}),
    ("POST", "/v1/adapters/json/restore"): (200, ADAPTER),
    ("POST", "/v1/adapters/json/versions/1/restore"): (200, version_of(1)),
}


@pytest.fixture
def run(run):
    return lambda *arguments: run("adapters", *arguments)


def facts_of(result):
    """Value of each name in the printed tables."""
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    return dict(line.split(maxsplit=1) for line in lines if len(line.split(maxsplit=1)) == 2)


@pytest.mark.parametrize(
    ("command", "data"),
    [
        (("list",), [EMPTY, ADAPTER]),
        (("show", "json"), {**ADAPTER, "grants": [GRANT, OFFERED]}),
        (("offers",), [OFFER, ACCEPTED]),
        (("versions", "json"), [version_of(2), version_of(1)]),
        (("moves", "json", "prod"), MOVES),
    ],
)
def test_every_listing_is_also_json_and_nothing_else(run, command, data):
    result = run(*command, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == data


def test_what_is_listed_says_the_base_model(run):
    assert facts_of(run("show", "json"))["base_model"].strip() == "base"
    for command in (("list",), ("versions", "json")):
        heads, *rows = run(*command).stdout.splitlines()
        place = heads.split().index("base")
        assert rows[-1].split()[place] == "base"


@pytest.mark.parametrize(
    "command",
    [("list",), ("show", "json"), ("versions", "json"), ("moves", "json", "prod"), ("offers",)],
)
def test_what_is_listed_fits_a_terminal_of_80_columns(run, command):
    result = run(*command)
    assert result.exit_code == 0
    assert max(len(line.rstrip()) for line in result.stdout.splitlines()) <= 80


def test_an_adapter_is_shown_in_the_units_of_people(run):
    facts = facts_of(run("show", "json"))
    assert facts["pin"].strip() == "version 2, 3.1 MB at $0.00000155 an hour"
    assert facts["pinned"].split() == ["since", "2025-06-15", "15:06:40Z"]
    assert facts["canaries"].strip() == "prod=10 % to 2"
    assert facts["granted"].split() == ["to", "globex"]
    assert facts["offered"].split() == ["to", "nobody"]
    assert facts["rank"].strip() == "4 in 2 modules, 8 in 12 modules"
    assert facts["size"].strip() == "2.5 MB"
    assert facts["on"].split(maxsplit=2)[2].strip() == "3.1 MB"
    assert facts["cold"].split(maxsplit=1)[1].strip() == "12 ms"
    assert facts["storage"].strip() == "$0.000254 a month"


def test_all_warnings_of_a_passport_are_shown(run):
    shown = run("show", "json").stdout
    assert "rank_pattern has 'x', which matches no module." in shown
    assert "It took long." in shown


def test_a_search_and_deleted_versions_are_asked_of_the_server(run, api):
    run("list", "--search", "js")
    run("versions", "json", "--deleted")
    assert [path for _, path, _ in api.asked()] == [
        "/v1/adapters?search=js&limit=1000",
        "/v1/adapters/json/versions?include_deleted=true&limit=1000",
    ]


@pytest.mark.parametrize(
    ("command", "asked", "sentence"),
    [
        (
            ("alias", "json", "prod", "1"),
            ("PUT", "aliases/prod", {"version": 1}),
            "json@prod is version 1 now, 10 % to 2.",
        ),
        (
            ("alias", "json", "prod", "1", "--canary", "2", "--percent", "10"),
            ("PUT", "aliases/prod", {"version": 1, "canary": {"version": 2, "percent": 10}}),
            "json@prod is version 1 now, 10 % to 2.",
        ),
        (("pin", "json"), ("PUT", "pin", None), "3.1 MB at $0.00000155 an hour"),
        (("unpin", "json"), ("DELETE", "pin", None), "json is not pinned any more."),
        (("grant", "json", "ten_2"), ("PUT", "grants/ten_2", None), "globex may use json."),
        (("grant", "json", "nobody"), ("PUT", "grants/nobody", None), "json is offered to nobody"),
        (("revoke", "json", "ten_2"), ("DELETE", "grants/ten_2", None), "globex may not use json."),
        (("rm", "json", "--yes"), ("DELETE", "", None), "json is deleted"),
        (
            ("rm", "json", "--version", "1", "--yes"),
            ("DELETE", "versions/1", None),
            "json@1 is deleted",
        ),
        (("restore", "json"), ("POST", "restore", None), "json is back."),
        (
            ("restore", "json", "--version", "1"),
            ("POST", "versions/1/restore", None),
            "json@1 is back.",
        ),
    ],
)
def test_a_change_is_one_request_and_one_line(run, api, command, asked, sentence):
    method, path, body = asked
    result = run(*command)
    assert (result.exit_code, result.stdout) == (0, "")
    assert is_one_line(result.stderr, sentence)
    assert api.asked() == [(method, f"/v1/adapters/json/{path}".rstrip("/"), body)]


def test_offers_are_shown_with_what_helps_to_decide_and_answered_by_name(run, api):
    offered, accepted = (line.split() for line in run("offers").stdout.splitlines()[1:])
    told = ["acme/support", "offered", "2025-06-15", "16", "8.7", "MB", "$0.15", "$0.60"]
    assert offered == told
    assert accepted[1:5] == ["accepted", "-", "-", "-"]
    api.requests.clear()
    assert is_one_line(run("accept", "acme/support").stderr, "Requests may name acme/support.")
    assert is_one_line(run("decline", "acme/support").stderr, "acme/support is declined.")
    assert [(method, path) for method, path, _ in api.asked()] == [
        ("PUT", "/v1/offers/acme/support"),
        ("DELETE", "/v1/offers/acme/support"),
    ]


def test_a_rollback_says_whether_it_ended_a_split(run):
    split = run("rollback", "json", "prod")
    assert is_one_line(split.stderr, "json@prod is version 1 now. Its split, 10 % to 2, has ended.")
    assert is_one_line(run("rollback", "json", "latest").stderr, "json@latest is version 2 now.\n")


def test_nothing_is_removed_where_nobody_can_be_asked(run, api):
    refused = run("rm", "json")
    assert refused.exit_code == 2
    assert is_one_line(refused.stderr, "no terminal", "--yes")
    assert api.requests == []


@pytest.mark.parametrize(("answer", "exit_code", "num_requests"), [("n", 1, 0), ("y", 0, 1)])
def test_what_a_terminal_answers_is_done(run, api, answer, exit_code, num_requests):
    ours, terminal = os.openpty()
    os.write(ours, f"{answer}\n".encode())
    command = (sys.executable, "-m", "server.cli.main", "adapters", "rm", "json", "--version", "1")
    ended = subprocess.run(command, stdin=terminal, capture_output=True, text=True)
    os.close(ours)
    os.close(terminal)
    assert (ended.returncode, len(api.requests)) == (exit_code, num_requests), ended.stderr
    assert "Delete json@1?" in ended.stderr


@pytest.mark.parametrize("option", [("--canary", "2"), ("--percent", "10")])
def test_half_a_canary_is_a_wrong_call(run, api, option):
    result = run("alias", "json", "prod", "1", *option)
    assert result.exit_code == 2
    assert is_one_line(result.stderr, "--canary and --percent go together.")
    assert api.requests == []
