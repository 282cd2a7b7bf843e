import json
import stat

import pytest
import sqlalchemy as sa

from registry.tables import audit_log
from tests.server.fake_api import is_one_line

NEW = {"key_id": "k2", "api_key": "sk-secret"}
KEY = {"key_id": "k1", "revoked_at": 5, "last_used_at": 1_795_444_744, "expires_at": None}
LISTED = {"object": "list", "data": [KEY], "has_more": False}
ANSWERS = {
    (method, f"{prefix}/keys{path}"): (200, answer)
    for prefix in ("/v1", "/admin/v1/tenants/acme")
    for method, path, answer in (
        ("POST", "", NEW),
        ("GET", "", LISTED),
        ("POST", "/k1/rotate", NEW),
        ("DELETE", "/k1", {"ended": ["k1"]}),
        ("DELETE", "", {"ended": ["k1", "k2"]}),
    )
}


@pytest.mark.parametrize(
    ("tenant", "prefix", "key"),
    [((), "/v1/keys", "tenant-key"), (("acme",), "/admin/v1/tenants/acme/keys", "admin-key")],
)
def test_a_tenants_admin_and_the_operator_do_the_same_each_with_its_key(
    run, api, tenant, prefix, key
):
    for command in (("create",), ("list",), ("rotate", "k1"), ("revoke", "k1")):
        assert run("keys", *command, *tenant).exit_code == 0
    assert [(method, path.partition("?")[0]) for method, path, _ in api.asked()] == [
        ("POST", prefix),
        ("GET", prefix),
        ("POST", f"{prefix}/k1/rotate"),
        ("DELETE", f"{prefix}/k1"),
    ]
    assert {request.headers["authorization"] for request in api.requests} == {f"Bearer {key}"}


def test_what_was_said_of_a_key_is_sent_and_nothing_else(run, api):
    run("keys", "create", "--scope", "admin", "--scope", "inference", "--max-concurrency", "3")
    assert api.asked()[0][2] == {
        "name": "",
        "scopes": ["admin", "inference"],
        "max_concurrency": 3,
    }
    run("keys", "create")
    run("keys", "rotate", "k1", "--overlap-s", "0")
    assert [body for *_, body in api.asked()[1:]] == [{"name": ""}, {"overlap_s": 0}]


def test_a_compromised_key_is_rotated_without_an_overlap(run, api):
    run("keys", "rotate", "k1", "--compromised")
    assert api.asked()[0][2] == {"overlap_s": 0, "compromised": True}


def test_keys_are_revoked_with_all_that_came_of_them_and_all_of_a_tenant(run, api):
    for options in (("k1", "--cascade"), ("k1", "acme", "--cascade"), ("--all", "acme", "--yes")):
        assert "Revoked: k1" in run("keys", "revoke", *options).stderr
    assert "--yes" in run("keys", "revoke", "--all", "acme").stderr
    assert [path for _, path, _ in api.asked()] == [
        "/v1/keys/k1?cascade=true",
        "/admin/v1/tenants/acme/keys/k1?cascade=true",
        "/admin/v1/tenants/acme/keys",
    ]
    assert run("keys", "revoke", "--all", "k1", "acme").exit_code == 2


def test_times_of_a_listed_key_are_dates(run):
    told = run("keys", "list").stdout
    assert "2026-11-23 14:39:04Z" in told
    assert "1,795,444,744" not in told


@pytest.mark.parametrize("command", [("create",), ("rotate", "k1")])
def test_a_new_key_is_all_that_stands_on_stdout(run, command):
    result = run("keys", *command)
    assert result.stdout == "sk-secret\n"
    assert "only this once" in result.stderr


def test_the_key_is_the_first_that_json_says_of_it(run):
    made = json.loads(run("keys", "create", "--json").stdout)
    assert made == NEW
    assert next(iter(made)) == "api_key"


def test_the_admin_key_is_replaced_on_the_servers_machine_and_that_is_audited(
    run, sqlite_database, tmp_path
):
    path = tmp_path / "admin.key"
    path.write_text("old\n")
    result = run("keys", "reset-admin", "--data-dir", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    new = path.read_text().strip()
    assert len(new) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert new not in result.stdout + result.stderr
    row = sqlite_database.read_sync(lambda conn: conn.execute(sa.select(audit_log)).one())
    assert (row.actor, row.action) == ("operator", "admin_key.reset")
    assert new not in repr(row)


def test_without_its_record_the_admin_key_is_not_replaced(run, tmp_path):
    (tmp_path / "admin.key").write_text("old\n")
    result = run("keys", "reset-admin", "--data-dir", str(tmp_path))
    assert is_one_line(result.stderr, "chorale.db")
    assert (tmp_path / "admin.key").read_text() == "old\n"


def test_a_key_of_the_environment_is_not_reset_in_a_file(run, sqlite_database, tmp_path):
    result = run("keys", "reset-admin", "--data-dir", str(tmp_path))
    assert result.exit_code == 1
    assert "CHORALE_ADMIN_KEY" in result.stderr
    assert not (tmp_path / "admin.key").exists()
