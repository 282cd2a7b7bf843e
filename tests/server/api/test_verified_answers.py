"""Each answer of the API is written to a file, which `chorale receipts verify` reads."""

import json

import pytest
from typer.testing import CliRunner

from server.billing import credits
from server.billing.exports.formats import FORMATS
from server.billing.months import end_of, month_of
from server.billing.receipts.signing_keys import record_key
from server.billing.statements import Statements
from server.cli.main import app
from tests.server.api.test_receipt_routes import use, write
from tests.server.factories import NOW_MS

MONTH = month_of(NOW_MS)
SINCE = f"start={MONTH}-01"
PATHS = {
    "a receipt": "/v1/receipts/plain",
    "an attempt's receipt": "/v1/receipts/routed.2",
    "a credit's receipt": "/v1/receipts/entry_{credit}",
    "attempts": "/v1/receipts/routed/attempts",
    "the attempts of a request without any": "/v1/receipts/plain/attempts",
    "a statement": f"/v1/statements/{MONTH}",
    **{f"{name} export": f"/v1/usage/export?format={name}&{SINCE}" for name in FORMATS},
}


@pytest.fixture(scope="module")
def acme(shared_product):
    """A tenant with a request that was corrected, two attempts, of which the second was settled
    first, and a credit.
    """
    user, signer = shared_product.user("acme"), shared_product.gateway.signer
    write(shared_product, lambda conn: record_key(conn, signer.public, NOW_MS))
    for seq, request_id in enumerate(("plain", "routed.2", "routed.1"), start=1):
        use(user, request_id, seq)
    options = {"memo": None, "now_ms": NOW_MS}

    def book(conn):
        given = {"idempotency_key": "give"} | options
        credits.post_credit(conn, signer, "credit", user.tenant_id, 5, **given)
        credits.post_correction(conn, signer, 1, idempotency_key="undo", **options)

    write(shared_product, book)
    issuing = Statements(shared_product.gateway.database, signer, now_ms=lambda _: end_of(MONTH))
    issuing.issue(user.tenant_id, MONTH)
    return user


def keep(acme, folder, path):
    """Write an answer and the keys to files, and return both."""
    answer = acme.call("GET", path.format(credit=4))
    assert answer.status_code == 200, answer.text
    (folder / "answer").write_bytes(answer.content)
    (folder / "keys.json").write_bytes(acme.call("GET", "/v1/receipts/keys").content)
    return folder / "answer", folder / "keys.json"


def verify(file, keys, *options):
    command = ["receipts", "verify", str(file), "--key", str(keys), *options]
    return CliRunner().invoke(app, command)


@pytest.mark.parametrize("name", PATHS)
def test_each_answer_is_verified_as_it_was_written_to_a_file(acme, tmp_path, name):
    result = verify(*keep(acme, tmp_path, PATHS[name]))
    assert (result.exit_code, " hold" in result.stderr) == (0, True), result.output


def test_what_the_operator_books_is_verified_too(acme, shared_product, tmp_path):
    _, keys = keep(acme, tmp_path, PATHS["a receipt"])
    path = f"/admin/v1/tenants/{acme.tenant_id}/payments"
    key = {"idempotency-key": "pay"}
    booked = shared_product.operator.call("POST", path, {"amount_usd": "3.50"}, headers=key)
    assert booked.status_code == 201, booked.text
    (tmp_path / "booked").write_bytes(booked.content)
    result = verify(tmp_path / "booked", keys)
    assert (result.exit_code, " hold" in result.stderr) == (0, True), result.output


@pytest.mark.parametrize("name", FORMATS)
def test_each_export_comes_to_the_statement(acme, tmp_path, name):
    statement, keys = keep(acme, tmp_path, PATHS["a statement"])
    stated = statement.rename(tmp_path / "statement.json")
    file, keys = keep(acme, tmp_path, PATHS[f"{name} export"])
    result = verify(file, keys, "--statement", str(stated), "--complete")
    assert result.exit_code == 0, result.output


def test_attempts_are_verified_as_a_whole(acme, tmp_path):
    file, keys = keep(acme, tmp_path, PATHS["attempts"])
    listed = json.loads(file.read_bytes())
    assert [it["parent_id"] for it in listed["data"]] == ["routed", "routed"]
    found = json.loads(verify(file, keys, "--json").stdout)
    assert (found["num_receipts"], found["num_findings"]) == (2, 0)

    def fields_of(data):
        file.write_text(json.dumps(listed | {"data": data}))
        return [it["field"] for it in json.loads(verify(file, keys, "--json").stdout)["findings"]]

    first, second = listed["data"]
    assert fields_of([first, second | {"parent_id": "other"}]) == ["parent_id", "request_id"]
    plain = acme.call("GET", "/v1/receipts/plain").json()
    assert fields_of([first, plain]) == ["request_id"]
    assert fields_of([first, first]) == ["receipt_seq"]
    changed = second | {"receipt": second["receipt"] | {"completion_tokens": 4}}
    assert None in fields_of([first, changed])


@pytest.mark.parametrize("data", [[], 5, {}, [5], [{"object": "receipt"}]])
def test_a_list_that_is_not_of_receipts_is_refused_in_one_line(acme, tmp_path, data):
    file, keys = keep(acme, tmp_path, PATHS["attempts"])
    file.write_text(json.dumps({"object": "list", "data": data, "has_more": False}))
    result = verify(file, keys)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
