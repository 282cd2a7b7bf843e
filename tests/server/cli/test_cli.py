import json
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from server.cli.terminal import OneLineErrors
from server.database.database import Database
from server.version import VERSION
from tests.server.fake_api import is_one_line, list_of

TENANT = {"tenant_id": "ten_1", "name": "acme", "status": "active", "weight": 1.0}
SENTENCE = "There is no tenant 'nobody'."


def used(dimension, value, count):
    return {
        dimension: value,
        "num_requests": 3,
        "num_failed_requests": 2,
        "prompt_tokens": count,
        "cached_tokens": 4,
        "completion_tokens": 5,
        "amount_nanousd": count,
        "amount_usd": f"0.{count:09d}",
    }


def usage_of(*items):
    bookings = [{"kind": "payment", "amount_nanousd": -5, "amount_usd": "-0.000000005"}]
    return 200, {**list_of(*items)[1], "bookings": bookings}


def events_of(*texts):
    chunks = [{"choices": [{"delta": {"content": text}}]} for text in texts]
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return 200, "".join([*lines, "data: [DONE]\n\n"]).encode()


BALANCE = {
    "tenant": "acme",
    "balance_nanousd": -5,
    "balance_usd": "-0.000000005",
    "held_usd": "0.000000001",
    "available_usd": "-0.000000006",
}
LIMIT = {
    "scope": "tenant", "id": "ten_1", "metric": "requests", "limit": 60, "used": 1,
    "remaining": 59, "reset_s": 0.75, "held_by": [],
}  # fmt: skip
ANSWERS = {
    ("GET", "/admin/v1/tenants"): list_of(TENANT),
    ("POST", "/admin/v1/tenants"): (201, TENANT),
    ("GET", "/admin/v1/tenants/nobody"): (404, {"error": {"message": SENTENCE, "code": "x"}}),
    ("GET", "/admin/v1/tenants/acme/keys"): list_of({"key_id": "k1", "revoked_at": 5}),
    ("GET", "/admin/v1/usage"): usage_of(used("tenant", "ten_1", 1), used("tenant", "ten_2", 2)),
    ("GET", "/v1/usage"): usage_of(used("model", "json", 12345)),
    ("GET", "/v1/balance"): (200, BALANCE),
    ("GET", "/v1/limits"): list_of(LIMIT),
    ("GET", "/v1/usage/export"): (200, b"event_id,model\n1,json\n"),
    ("GET", "/v1/models/json"): (200, {"id": "json"}),
    ("GET", "/v1/models/json@1"): (200, {"id": "json@1", "shutdown_date": "2027-01-14"}),
    ("POST", "/v1/chat/completions"): events_of("He", "llo"),
}


def test_an_error_of_the_server_is_one_line_and_exit_1(run):
    result = run("tenants", "show", "nobody")
    assert (result.exit_code, result.stdout) == (1, "")
    assert is_one_line(result.stderr, "Error: ", SENTENCE)


def test_a_server_that_is_not_there_is_one_line_and_exit_1(run):
    result = run("tenants", "list", "--url", "http://127.0.0.1:1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert is_one_line(result.stderr, "http://127.0.0.1:1 does not answer", "chorale serve")


@pytest.mark.parametrize(
    ("command", "data"),
    [
        (("tenants", "list"), [TENANT]),
        (("keys", "list", "acme"), [{"key_id": "k1", "revoked_at": 5}]),
        (("usage", "show"), [used("model", "json", 12345)]),
    ],
)
def test_every_listing_is_also_json_and_nothing_else(run, command, data):
    result = run(*command, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == data


def test_a_table_in_a_pipe_keeps_a_row_on_one_line(run):
    result = run("usage", "show", "--group-by", "model")
    row = next(line for line in result.stdout.splitlines() if line.startswith("json"))
    assert row.split() == ["json", "3", "2", "12,345", "4", "5", "0.000012345"]


def test_payments_stand_apart_from_usage(run):
    *_, total, header, payment = run("usage", "show", "--group-by", "model").stdout.splitlines()
    assert (total.split()[0], total.split()[-1]) == ("total", "0.000012345")
    assert header.startswith("not in the sums")
    assert payment.split() == ["payment", "-0.000000005"]


def test_a_table_of_usage_ends_with_its_total(run, api):
    lines = run("usage", "show", "--all-tenants").stdout.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["tenant", "ten_1", "ten_2", "total"]
    assert lines[3].split() == ["total", "6", "4", "3", "8", "10", "0.000000003"]
    run("usage", "show", "--group-by", "kind", "--group-by", "day")
    assert "group_by=kind&group_by=day" in api.asked()[-1][1]


def test_operators_and_tenants_use_their_own_keys(run, api):
    run("tenants", "list")
    run("adapters", "list")
    keys = [request.headers["authorization"] for request in api.requests]
    assert keys == ["Bearer admin-key", "Bearer tenant-key"]


def test_the_admin_key_is_found_in_the_data_directory(run, api, monkeypatch, tmp_path):
    monkeypatch.delenv("CHORALE_ADMIN_KEY")
    (tmp_path / "admin.key").write_text("from-file\n")
    assert run("tenants", "list", "--data-dir", str(tmp_path)).exit_code == 0
    assert api.requests[0].headers["authorization"] == "Bearer from-file"


def test_a_missing_key_says_how_to_give_it(run, monkeypatch):
    monkeypatch.delenv("CHORALE_ADMIN_KEY")
    monkeypatch.delenv("CHORALE_API_KEY")
    assert is_one_line(run("tenants", "list").stderr, "CHORALE_ADMIN_KEY", "--data-dir")
    assert is_one_line(run("adapters", "list").stderr, "CHORALE_API_KEY")


def test_only_limits_that_were_given_are_sent(run, api):
    run("tenants", "create", "acme", "--requests-per-minute", "60", "--plan", "gold")
    assert api.asked()[0][2] == {"name": "acme", "requests_per_minute": 60, "plan": "gold"}


PRICES = ("prompt", "cached", "completion", "storage", "pinned", "resident")
ROW = {f"{name}_nanousd": 150 for name in PRICES} | {"effective_at": 1, "until": None, "at": 1}
OF = "/admin/v1/tenants/acme"
CALLS = [
    ("budgets list acme", "GET", f"{OF}/budgets", None),
    ("budgets set acme monthly/hard 12.5", "PUT", f"{OF}/budgets/monthly/hard", {"amount": "12.5"}),
    ("budgets rm acme monthly/hard", "DELETE", f"{OF}/budgets/monthly/hard", None),
    ("credits add acme 5", "POST", f"{OF}/credits", {"amount_usd": "5", "memo": None}),
    ("payments add acme 5 --memo x", "POST", f"{OF}/payments", {"amount_usd": "5", "memo": "x"}),
    ("corrections add 7 --memo x", "POST", "/admin/v1/corrections", {"entry_id": 7, "memo": "x"}),
    ("tenants balance acme", "GET", f"{OF}/balance", None),
    ("tenants suspend acme", "POST", f"{OF}/suspend", None),
    ("tenants resume acme", "POST", f"{OF}/resume", None),
    ("tenants set acme weight=2 plan=none", "PATCH", OF, {"weight": "2", "plan": None}),
    ("audit-log list --actor me", "GET", "/admin/v1/audit-log?actor=me", None),
    ("prices list", "GET", "/admin/v1/prices", None),
    ("prices add prompt=0.15 storage=2", "POST", "/admin/v1/prices", {
        "prompt_nanousd": 150, "storage_nanousd": 2 * 10**9,
        "scope": "default", "scope_id": "", "base_model": "", "effective_at": None, "until": None}),
    ("prices add prompt=0.15 --base org/large --scope plan --scope-id gold", "POST",
        "/admin/v1/prices", {
        "prompt_nanousd": 150, "scope": "plan", "scope_id": "gold", "base_model": "org/large",
        "effective_at": None, "until": None}),
    ("tenants set-base-limits acme org/large --max-concurrency 2", "PUT", f"{OF}/limits/org/large",
        {"requests_per_minute": None, "tokens_per_minute": None, "max_concurrency": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("command", "method", "path", "body"), CALLS)
def test_an_operators_command_is_one_call(run, api, monkeypatch, command, method, path, body):
    answer = {**ROW, "data": [ROW]}
    monkeypatch.setitem(ANSWERS, (method, path.partition("?")[0]), (200, answer))
    _, row = run(*command.split()).stdout.splitlines()
    assert api.asked() == [(method, path, body)]
    assert ("$0.15" in row) == command.startswith("prices")
    shown = json.loads(run(*command.split(), "--json").stdout)
    assert shown == ([ROW] if " list" in command else answer)


def test_a_tenant_sees_its_balance_and_its_limits(run):
    [names, amounts] = run("balance").stdout.splitlines()
    assert dict(zip(names.split(), amounts.split(), strict=True)) == {
        name: BALANCE[name] for name in ("tenant", "balance_usd", "held_usd", "available_usd")
    }
    assert json.loads(run("balance", "--json").stdout) == BALANCE
    line = run("limits").stdout.splitlines()[1]
    assert line.split() == ["tenant", "ten_1", "requests", "60", "1", "59", "0.75"]
    assert json.loads(run("limits", "--json").stdout)["data"] == [LIMIT]


def test_limits_on_base_models_are_a_table(run, api, monkeypatch):
    row = {"base_model": "org/large", "requests_per_minute": 6, "max_concurrency": None}
    monkeypatch.setitem(ANSWERS, ("GET", f"{OF}/limits"), list_of(row))
    lines = run("tenants", "base-limits", "acme").stdout.splitlines()
    assert lines[1].split() == ["org/large", "6", "-", "-"]


@pytest.mark.parametrize("given", ["prompt=0.0005", "prompt=NaN", "prompt", "nope=1"])
def test_a_price_that_is_not_whole_nano_dollars_is_not_sent(run, api, given):
    result = run("prices", "add", given)
    assert (result.exit_code, api.asked()) == (2, [])
    assert "give dollars, to the nano-dollar of a token" in result.stderr


def test_an_export_goes_to_stdout_or_to_a_file_as_it_came(run, api, tmp_path):
    assert run("usage", "export", "--format", "csv").stdout == "event_id,model\n1,json\n"
    result = run("usage", "export", "--start", "2026-03-01", "--output", "usage.csv")
    assert result.stdout == ""
    assert (tmp_path / "usage.csv").read_text() == "event_id,model\n1,json\n"
    assert "start=2026-03-01" in api.asked()[1][1]
    assert [path.name for path in tmp_path.iterdir()] == ["usage.csv"]


def test_an_export_of_a_statements_period_has_no_start(run, api):
    run("usage", "export", "--period", "2026-11", "--output", "usage.csv")
    assert api.asked()[0][1] == "/v1/usage/export?format=csv&period=2026-11"


def test_an_export_that_cannot_be_written_is_one_line(run):
    result = run("usage", "export", "--output", "/nowhere/usage.csv")
    assert result.exit_code == 2
    assert is_one_line(result.stderr, "/nowhere/usage.csv: No such file or directory")


BELOW_A_FILE = [
    ("serve", "--model", "m", "--port", "0", "--data-dir", "{}"),
    ("demo", "--port", "0", "--data-dir", "{}"),
    ("serve", "--config", "{}"),
    ("simulate", "--book", "{}"),
    ("usage", "export", "--output", "{}"),
    ("backup", "{}", "--data-dir", "ledger"),
    ("adapters", "push", ".", "--name", "x", "--response-template", "{}"),
]


@pytest.mark.parametrize("command", BELOW_A_FILE, ids=" ".join)
def test_a_file_that_cannot_be_had_is_one_line_that_names_it_and_says_what_to_do(
    run, tmp_path, command
):
    (tmp_path / "ledger").mkdir()
    Database(data_dir=tmp_path / "ledger").close()
    (tmp_path / "file").touch()
    path = str(tmp_path / "file" / "below")
    result = run(*(word.format(path) for word in command))
    assert (result.exit_code, isinstance(result.exception, SystemExit)) == (1, True)
    assert is_one_line(result.stderr.splitlines(keepends=True)[-1], f"Error: {path}: ", ". Give ")


SERVE = ("serve", "--model", ".", "--port", "0", "--data-dir", "data")
DAMAGED = [
    ("chorale.toml", ("serve", "--config", "chorale.toml")),
    ("gateway.json", ("audit", "--data-dir", ".")),
    ("gateway.json", ("backup", "copy", "--data-dir", ".")),
    ("tokenizer.json", SERVE),
    ("tokenizer_config.json", SERVE),
]


@pytest.mark.parametrize(("file", "command"), DAMAGED)
@pytest.mark.parametrize("content", [b"\xff\xfe{", b"[1]", b"{"])
def test_a_damaged_file_is_one_line_that_names_it(run, tmp_path, file, command, content):
    if command is SERVE:
        shutil.copytree(files("demo") / "model", tmp_path, dirs_exist_ok=True)
    (tmp_path / file).write_bytes(content)
    result = run(*command)
    assert is_one_line(result.stderr, "Error: ", file)
    assert result.exit_code in (1, 2)


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("admin.key", ("tenants", "list")),
        ("book", ("simulate", "--book=book", "--admin-key=key")),
    ],
)
def test_a_file_that_is_no_text_is_one_line_that_names_it(
    run, tmp_path, monkeypatch, file, command
):
    monkeypatch.delenv("CHORALE_ADMIN_KEY")
    (tmp_path / file).write_bytes(b"\xff\xfe{")
    assert is_one_line(run(*command, "--data-dir", ".").stderr, "Error: ", file)


def test_a_ledger_without_tables_is_one_line(run, tmp_path):
    (tmp_path / "chorale.db").touch()
    for command in (("audit",), ("backup", "copy")):
        result = run(*command, "--data-dir", str(tmp_path))
        assert is_one_line(result.stderr, f"{tmp_path / 'chorale.db'}: no such table")


def test_a_ledger_that_may_not_be_opened_is_one_line(run, tmp_path):
    (tmp_path / "chorale.db").mkdir()
    result = run("audit", "--data-dir", str(tmp_path))
    assert is_one_line(result.stderr, f"{tmp_path / 'chorale.db'}: SQLite cannot open it", "right")


def test_a_disk_that_gets_full_is_one_line_though_no_file_is_named():
    app = typer.Typer(cls=OneLineErrors)
    app.callback()(lambda: None)
    app.command("write")(lambda: Path("/dev/full").write_text("x") and None)
    result = CliRunner().invoke(app, ["write"])
    assert is_one_line(result.stderr, "No space left", "Make room")


def test_a_time_is_a_date_or_a_date_with_a_time_or_seconds(run, api, monkeypatch):
    path = "/admin/v1/tenants/acme/keys"
    monkeypatch.setitem(ANSWERS, ("POST", path), (201, {"key_id": "k", "api_key": "s"}))
    for given in ("2027-01-31", "2027-01-31T02:00+02:00", "1801353600"):
        assert run("keys", "create", "acme", "--expires-at", given).exit_code == 0
    assert [body["expires_at"] for *_, body in api.asked()] == [1801353600] * 3
    for command in (("keys", "create", "--expires-at"), ("prices", "add", "prompt=1", "--until"),
                    ("audit", "--since")):  # fmt: skip
        for given in ("tomorrow", "1801353600000"):
            result = run(*command, given)
            assert (result.exit_code, f"'{given}' is no time" in result.stderr) == (2, True)


def test_a_key_that_has_expired_is_not_shown_as_active(run, monkeypatch):
    keys = [{"key_id": "k1", "expires_at": 5}, {"key_id": "k2", "expires_at": 1 << 32},
            {"key_id": "k3", "revoked_at": 5, "expires_at": 5}, {"key_id": "k4"}]  # fmt: skip
    monkeypatch.setitem(ANSWERS, ("GET", "/admin/v1/tenants/acme/keys"), list_of(*keys))
    states = [line.split()[-1] for line in run("keys", "list", "acme").stdout.splitlines()[1:]]
    assert states == ["expired", "active", "revoked", "active"]


def test_a_chat_streams_its_answers_and_remembers_what_was_said(run, api):
    result = run("chat", "--model", "json", input="hi\n\nand now?\n/new\nhi again\n")
    assert (result.exit_code, result.stdout) == (0, "Hello\nHello\nHello\n")
    asked = [body["messages"] for method, _, body in api.asked() if method == "POST"]
    assert [len(messages) for messages in asked] == [1, 3, 1]
    assert asked[1][1] == {"role": "assistant", "content": "Hello"}


@pytest.mark.parametrize(
    ("model", "said"), [("nope", "Not here."), ("json@1", "json@1 was deleted on 2027-01-14.")]
)
def test_a_chat_with_a_model_that_is_not_there_does_not_begin(run, api, model, said):
    result = run("chat", "--model", model, input="hi\n")
    assert result.exit_code == 1
    assert is_one_line(result.stderr, said)
    assert [method for method, *_ in api.asked()] == ["GET"]


@pytest.mark.parametrize("command", [("serve",), ("serve", "--model", "m", "--port", "70000")])
def test_settings_that_cannot_be_are_one_line_and_exit_2(run, command):
    result = run(*command)
    assert result.exit_code == 2
    assert is_one_line(result.stderr, "Error: ")


def test_a_chorale_toml_that_is_not_read_is_pointed_out(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "chorale.toml" not in run("serve").stderr
    (tmp_path / "chorale.toml").write_text('model = "m"\n')
    assert "chorale.toml in this folder is not read: give --config chorale.toml" in (
        run("serve").stderr
    )
    assert "is not read" not in run("serve", "--config", "chorale.toml", "--port", "-1").stderr


def test_a_model_that_is_not_there_is_one_line_and_exit_1(run, tmp_path):
    data_dir = tmp_path / "data"
    result = run("serve", "--model", "/no/such", "--data-dir", str(data_dir), "--port", "0")
    assert result.exit_code == 1
    assert is_one_line(result.stderr, "There is no model '/no/such'")
    assert not (data_dir / "admin.key").exists()


def test_the_version_is_said_and_nothing_else(run):
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"chorale {VERSION}\n")


def test_the_audit_says_what_its_data_directory_is_for(run):
    told = run("audit", "--help", terminal_width=200).stdout
    assert "journals" in told
    assert "admin.key" not in told


def test_help_loads_nothing_heavy():
    script = """
import sys
from server.cli.main import app
heavy = {"torch", "httpx", "pydantic", "sqlalchemy", "fastapi", "tokenizers", "huggingface_hub"}
sys.exit(", ".join(heavy & set(sys.modules)) or 0)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
