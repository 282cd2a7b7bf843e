"""`chorale top`: looks at fixed answers, drawn without a terminal and without a clock."""

import json

import pytest
from rich.console import Console

from server.cli.top import draw, poll, watch
from server.client.http import Client, ClientError, ServerUnreachable
from tests.server.fake_api import fixed, list_of, make_run

FIGURES = {
    "running": 3, "waiting": 5, "batch_tokens": 41, "prompt_tokens": 200, "completion_tokens": 100,
    "cached_tokens": 150, "total_slabs": 100, "free_slabs": 50, "adapter_slabs": 20,
    "prefix_slabs": 10, "tiers": [{"tier": "device", "used_bytes": 7_000_000}],
}  # fmt: skip
ENGINE = {
    "name": "engine", "base_model": "base", "machine": "m1", "state": "ready", "starts": 1,
    "engine_id": "eng-1", "figures": FIGURES,
}  # fmt: skip
AWAY = {**ENGINE, "name": None, "base_model": None, "state": "silent", "figures": None}
MODEL = {"name": "base", "state": "serving", "engines": 1, "requests_here": 8}


def used(tenant, tokens):
    counts = {"num_requests": 1, "num_failed_requests": 0, "completion_tokens": tokens}
    return {"tenant": tenant, "prompt_tokens": 2, **counts}


ANSWERS = {
    ("GET", "/admin/v1/engines"): list_of(ENGINE, AWAY),
    ("GET", "/admin/v1/models"): list_of(MODEL),
    ("GET", "/admin/v1/usage"): list_of(*(used(f"ten_{n}", n * 10) for n in range(7))),
    **{("GET", f"/admin/v1/tenants/ten_{n}"): (200, {"name": f"acme-{n}"}) for n in range(7)},
    ("GET", "/metrics"): (200, b'chorale_settler_lag_records{engine_id="eng-1"} 12\n'),
}


@pytest.fixture
def look(run):
    """One look, as --json prints it."""
    result = run("top", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def lines(*looks, width):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(draw(*looks, width=width))
    return capture.get().splitlines()


def test_a_look_has_the_figures_of_engines_models_and_the_busiest_tenants(look):
    engine, away = look["engines"]
    assert engine["arena"] == pytest.approx(
        {"kv": 0.2, "prefix": 0.1, "adapters": 0.2, "free": 0.5}
    )
    assert (engine["running"], engine["prefix_hits"]) == (3, 0.75)
    assert (away["name"], away["running"], away["arena"]) == ("eng-1", None, None)
    assert look["models"] == [MODEL]
    assert [it["tenant"] for it in look["tenants"]] == [f"acme-{n}" for n in (6, 5, 4, 3, 2)]
    assert (look["gateway"]["settler_lag"], look["gateway"]["audited_at"]) == (12, None)


def test_tokens_per_second_are_those_between_two_looks_at_the_same_start(look):
    engine, away = look["engines"]
    later = {**engine, "completion_tokens": 400}
    before = {**look, "at": look["at"] - 2}
    row = lines({**look, "engines": [later, away]}, before, width=130)[1]
    assert row.split() == [
        "engine",
        "base",
        "ready",
        "3",
        "5",
        "41",
        "150",
        "75%",
        "████▓▓▒▒▒▒░░░░░░░░░░",
    ]
    for change in ({"starts": 2}, {"completion_tokens": 40}, {"machine": "m2"}):
        again = {**later, **change}
        assert lines({**look, "engines": [again]}, before, width=130)[1].split()[6] == "-"


def test_a_narrow_terminal_leaves_columns_out_and_cuts_none(look):
    drawn = lines(look, width=44)
    assert drawn[0].split() == ["name", "state", "running", "waiting", "tokens/s"]
    assert drawn[1].split() == ["engine", "ready", "3", "5", "-"]
    assert drawn[2].split() == ["eng-1", "silent", "-", "-", "-"]
    assert "…" not in "".join(drawn)


def test_a_gateway_that_is_away_is_said_and_asked_again_until_ctrl_c(look):
    answers = iter([ServerUnreachable("http://here", "refused"), look, look])
    shown, said, waits = [], [], iter([None, None, KeyboardInterrupt()])

    def next_of(them):
        it = next(them)
        if isinstance(it, BaseException):
            raise it
        return it

    watch(
        lambda: next_of(answers),
        lambda *looks: shown.append(looks),
        said.append,
        lambda: next_of(waits),
    )
    assert shown == [(look, None), (look, look)]
    assert said == [
        "http://here does not answer (refused). Is `chorale serve` running? It will be asked again."
    ]


def test_a_key_that_is_refused_ends_it(make_api):
    api = make_api(fixed({("GET", "/x"): (401, {"error": {"message": "Wrong key."}})}))
    with Client(api.url, "key") as client, pytest.raises(ClientError, match="Wrong key"):
        watch(lambda: client.request("GET", "/x"), print, print, lambda: None)


def test_without_a_terminal_it_asks_for_json(monkeypatch, tmp_path):
    result = make_run("http://127.0.0.1:1", monkeypatch, tmp_path)("top")
    assert (result.exit_code, "--json" in result.stderr) == (2, True)


def test_an_engine_that_only_has_its_journal_settled_has_no_arena(api, monkeypatch):
    retired = {**ENGINE, "figures": dict.fromkeys(FIGURES, 0) | {"tiers": []}}
    monkeypatch.setitem(ANSWERS, ("GET", "/admin/v1/engines"), list_of(retired))
    with Client(api.url, "a key") as client:
        assert poll(client, str)["engines"][0]["arena"] is None
