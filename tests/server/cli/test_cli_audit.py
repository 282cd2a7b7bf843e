"""`chorale audit` on a data directory, called as an operator does."""

import asyncio
import json
import re
from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from server.billing.audit import auditor
from server.billing.tables import metadata, tenant_accounts
from server.cli.main import app
from server.database.database import Database
from server.launch.secrets import Secrets
from tests.server.audited_ledger import fill_ledger, make_ends, write_engine_dir
from tests.server.in_process import InProcess


@pytest.fixture
def data_dir(sqlite_database: Database, tmp_path: Path) -> Path:
    """Data directory of a running gateway, which holds the database file's lock."""
    ends = make_ends(12, seed=2)
    fill_ledger(sqlite_database, ends)
    write_engine_dir(tmp_path / "engine", ends)
    return tmp_path


def run(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["audit", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def break_balance(database: Database) -> None:
    query = sa.update(tenant_accounts).where(tenant_accounts.c.tenant_id == "ten_2")
    database.write_sync(lambda conn: conn.execute(query.values(balance_nanousd=3)))


def test_a_healthy_ledger_differs_by_nothing_and_is_left_as_it_is(data_dir, sqlite_database):
    def rows(conn):
        return [conn.execute(sa.select(table)).all() for table in metadata.sorted_tables]

    before = sqlite_database.read_sync(rows)
    exit_code, out, err = run("--data-dir", data_dir)
    assert exit_code == 0
    assert out.splitlines()[-1] == "difference 0 nano-dollars"
    checks = {re.split("  +", line)[0] for line in out.splitlines()}
    assert checks >= {"receipts", "journal files", "meter", "roll-ups"}
    assert "1 end records are not settled yet." in err
    assert sqlite_database.read_sync(rows) == before


def test_what_differs_is_named_and_the_command_fails(data_dir, sqlite_database):
    break_balance(sqlite_database)
    exit_code, out, _ = run("--data-dir", data_dir)
    assert exit_code == 1
    assert "accounts: tenant ten_2: balance_nanousd (expected " in out
    exit_code, out, _ = run("--data-dir", data_dir, "--json")
    report = json.loads(out)
    [finding] = [f for check in report["checks"] for f in check["findings"]]
    assert (exit_code, report["num_findings"]) == (1, 1)
    assert (finding["subject"], finding["found"]) == ("tenant ten_2", 3)


def test_an_operator_acknowledges_what_the_audit_names_and_it_names_it_no_more(
    data_dir, sqlite_database
):
    Secrets.load(data_dir)
    break_balance(sqlite_database)
    finding_id = run("--data-dir", data_dir)[1].partition(" accounts: ")[0].split()[-1]
    call = ("acknowledge", finding_id, "--reason", "known", "--data-dir", data_dir)
    assert "no price is known; known" in run(*call)[1]
    exit_code, out, _ = run("--data-dir", data_dir)
    assert (exit_code, f"acknowledged: {finding_id} accounts:" in out) == (0, True)
    exit_code, _, err = run(*call)
    assert (exit_code, "is acknowledged already" in err) == (1, True)


def test_a_database_by_its_url_needs_no_engine(data_dir, sqlite_database, tmp_path):
    url = sqlite_database.url.render_as_string()
    exit_code, out, err = run("--database-url", url, "--data-dir", tmp_path / "other")
    assert exit_code == 0
    assert "journal files" not in out
    assert "No engine's files are here" in err


def test_the_gateways_own_database_is_the_one_it_was_started_with(
    data_dir, sqlite_database, tmp_path
):
    other = tmp_path / "elsewhere"
    other.mkdir()
    url = sqlite_database.url.render_as_string()
    (other / "gateway.json").write_text(json.dumps({"settings": {"database_url": url}}))
    assert run("--data-dir", other)[0] == 0


def test_a_wrong_call_is_one_line(tmp_path):
    exit_code, _, err = run("--data-dir", tmp_path)
    assert exit_code == 2
    assert f"There is no {tmp_path / 'chorale.db'}" in err.replace("\n", "")
    assert not list(tmp_path.iterdir()), "an audit makes no files"
    assert run("--data-dir", tmp_path, "--since", "soon")[0] == 2


def test_the_operator_reads_the_gateways_last_audit(sqlite_database, tmp_path, monkeypatch):
    monkeypatch.setattr(auditor, "_SETTLE_WAIT_S", 0)  # there is no engine to wait for
    url = sqlite_database.url.render_as_string()
    sqlite_database.close()
    product = InProcess.build(tmp_path, url)
    assert product.operator.call("GET", "/admin/v1/audit").json()["report"] is None
    asyncio.run(product.gateway.auditor.turn())
    report = product.operator.call("GET", "/admin/v1/audit").json()["report"]
    assert (report["num_findings"], report["difference_nanousd"]) == (0, 0)
    fill_ledger(product.gateway.database, make_ends(12, seed=2))
    break_balance(product.gateway.database)
    asyncio.run(product.gateway.auditor.turn())
    [finding] = product.gateway.auditor.last.findings
    call = ("POST", "/admin/v1/audit/acknowledgements")
    body = {"finding_id": finding.finding_id, "reason": "known"}
    assert product.operator.call(*call, body).json()["kind"] == "difference"
    assert product.operator.call(*call, body).status_code == 409
    report = product.operator.call("GET", "/admin/v1/audit").json()["report"]
    assert (report["num_findings"], len(report["acknowledged"])) == (0, 1)
    product.close()
