"""`chorale receipts verify` needs only files."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from server.api.receipt_models import ReceiptAnswer
from server.billing.exports.formats import open_encoder
from server.billing.exports.reading import read_export
from server.billing.receipts.signing import Signer
from server.billing.statement_figures import SCHEMA, StatementFigures, sha256_of
from server.cli.main import app
from tests.server.factories import SIGNER
from tests.server.receipt_makers import make_rows, make_usage, reverse, seal
from tests.soak import soak

KEY = SIGNER.public.raw.hex()
TEXTS = ("csv", "jsonl", "cloudevents", "focus")
ROOT = Path(__file__).parents[3]


def encode(format, receipts):
    """(the file, the range of each receipt's bytes in it)"""
    encoder = open_encoder(format)
    content, places = encoder.begin(), []
    for receipt in receipts:
        start = len(content)
        content += encoder.add([receipt])
        places.append(range(start, len(content)))
    return content + encoder.end(), places


def without_payments(receipts):
    """The receipts that FOCUS has; it does not count payments as charges."""
    return [receipt for receipt in receipts if receipt["kind"] != "payment"]


def make_statement(receipts, opening_balance_nanousd=5):
    """An answer of /v1/statements/2026-02."""
    figures = StatementFigures()
    for receipt in receipts:
        figures.add(receipt)
    values = {
        "schema": SCHEMA,
        "tenant_id": "ten_1",
        "period": "2026-02",
        "issued_at": "2026-03-01T01:00:00.000Z",
        "currency": "USD",
        "opening_balance_nanousd": opening_balance_nanousd,
        **figures.document(),
        "closing_balance_nanousd": opening_balance_nanousd + figures.total_nanousd,
        "signing_key": SIGNER.key_id,
    }
    sha256 = sha256_of(values)
    return {
        "object": "statement",
        "status": "issued",
        "statement": values,
        "sha256": sha256,
        "signature": SIGNER.sign(sha256),
    }


def make_answer(is_reversed=False):
    """An answer of /v1/receipts/{request_id}."""
    first = make_usage(model="né", memo="x")
    rows = [first, reverse(seal([first])[0])] if is_reversed else [first]
    receipt, *corrections = seal(rows)
    answer = ReceiptAnswer(
        parent_id=None, receipt=receipt, corrections=corrections, verified_with=SIGNER.key_id
    )
    return answer.model_dump(mode="json")


def to_json(document):
    """Encode a document as the API does."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def verify(path, *options):
    arguments = ["receipts", "verify", str(path), "--key", KEY, *map(str, options)]
    return CliRunner().invoke(app, arguments)


def report(path, *options):
    result = verify(path, *options, "--json")
    return json.loads(result.stdout)


@pytest.mark.parametrize("format", ["csv", "focus"])
def test_an_export_is_verified(tmp_path, format):
    receipts = seal(make_rows(11, 30))
    path = tmp_path / "export"
    path.write_bytes(encode(format, receipts)[0])
    if format == "focus":
        receipts = without_payments(receipts)
    result = verify(path)
    assert (result.exit_code, result.stderr) == (
        0, f"All {len(receipts)} receipts hold: hash, signature, chain, amounts.\n"
    )  # fmt: skip
    for tenant_id, sums in report(path)["tenants"].items():
        own = [receipt for receipt in receipts if receipt["tenant_id"] == tenant_id]
        assert sums["total_nanousd"] == sum(receipt["amount_nanousd"] for receipt in own)
        assert sums["num_receipts"] == len(own)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(folder, {name: (content, the range of each receipt's bytes)})"""
    receipts = seal(make_rows(12, 4))
    made = {format: encode(format, receipts) for format in TEXTS}
    made["receipt"] = to_json(make_answer()), []
    made["reversed"] = to_json(make_answer(is_reversed=True)), []
    made["statement"] = to_json(make_statement(seal(make_rows(12, 9, ["ten_1"])))), []
    return tmp_path_factory.mktemp("files"), made


def flipped(content, position, digit):
    """Replace the digit or letter at or after a position: (content, position), or (None, 0)."""
    text = content.decode("latin-1")
    at = re.compile("[0-9A-Za-z]").search(text, position)
    if at is None or digit == at[0]:
        return None, 0
    return content[: at.start()] + digit.encode() + content[at.end() :], at.start()


ALPHANUMERIC = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def is_named(result, at, content, places):
    """Whether the output names the row; headers and documents have no rows."""
    rows = [place for place in places if place]
    row = next((row for row, place in enumerate(rows, start=1) if at in place), None)
    if row is None:
        return True
    if result.exit_code == 1:
        return f"row {row}," in result.stdout
    lines = [content.count(b"\n", 0, end) + 1 for end in (rows[row - 1][0], rows[row - 1][-1])]
    line = int(re.search(r"Line (\d+) cannot be read", result.stderr)[1])
    return lines[0] <= line <= lines[1]


@pytest.mark.parametrize(
    ("name", "max_examples"),
    [
        *((name, 20) for name in ("csv", "reversed", "statement")),
        *soak(*((name, 1000) for name in (*TEXTS, "receipt", "reversed", "statement"))),
    ],
)
def test_a_digit_or_letter_that_is_another_is_found_and_its_row_named(files, name, max_examples):
    folder, made = files
    content, places = made[name]
    path = folder / name
    path.write_bytes(content)
    assert verify(path).exit_code == 0

    @settings(max_examples=max_examples, deadline=None)
    @given(st.integers(0, len(content) - 1), st.sampled_from(ALPHANUMERIC))
    def flip(position, digit):
        changed, at = flipped(content, position, digit)
        if changed is None:
            return
        path.write_bytes(changed)
        result = verify(path)
        assert result.exit_code in (1, 2), (content[at - 40 : at + 40], digit)
        assert isinstance(result.exception, SystemExit), result.exception
        assert is_named(result, at, content, places), (at, result.output)

    flip()


def test_a_byte_of_a_parquet_file_is_found_unless_it_says_nothing_of_a_receipt(tmp_path):
    """A third of a small Parquet file is statistics and the like, which readers ignore."""
    receipts = seal(make_rows(12, 4))
    content, _ = encode("parquet", receipts)
    path = tmp_path / "export.parquet"

    @settings(max_examples=20, deadline=None)
    @given(st.integers(0, len(content) - 1), st.integers(1, 255))
    def flip(at, change):
        path.write_bytes(content[:at] + bytes([content[at] ^ change]) + content[at + 1 :])
        if verify(path).exit_code == 0:
            assert list(read_export(path)) == receipts

    flip()


# ---- no server, no database, no network ----

OFFLINE = """
import socket, sys

def refuse(*_):
    raise AssertionError("it reached for the network")

socket.socket.connect = socket.getaddrinfo = refuse
from server.cli.main import app

try:
    app(sys.argv[1:])
finally:
    heavy = {"sqlalchemy", "fastapi", "httpx", "torch", "numpy", "zmq"} & sys.modules.keys()
    assert not heavy, heavy
"""


def test_a_file_and_the_public_key_are_all_it_takes(tmp_path):
    receipts = seal(make_rows(13, 5, ["ten_1"]))
    (tmp_path / "export.csv").write_bytes(encode("csv", receipts)[0])
    (tmp_path / "statement.json").write_bytes(to_json(make_statement(receipts)))
    command = [sys.executable, "-c", OFFLINE, "receipts", "verify", "export.csv", "--key", KEY]
    ran = subprocess.run(
        [*command, "--statement", "statement.json", "--complete"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stderr) == (
        0, "All 5 receipts hold: hash, signature, chain, amounts.\n"
    )  # fmt: skip
    assert len(list(tmp_path.iterdir())) == 2


# ---- keys, statements, wrong files ----


def write(folder, **documents):
    paths = []
    for name, content in documents.items():
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else to_json(content))
        paths.append(path)
    return paths


def test_the_keys_may_be_the_answer_of_the_api(tmp_path):
    other = Signer(bytes(32))
    keys = {
        "object": "list",
        "data": [
            {"object": "receipt_key", "key_id": key.key_id, "public_key": key.raw.hex()}
            for key in (other.public, SIGNER.public)
        ],
    }
    export, listed = write(tmp_path, export=encode("jsonl", seal([make_usage()]))[0], keys=keys)
    run = CliRunner().invoke
    assert run(app, ["receipts", "verify", str(export), "--key", str(listed)]).exit_code == 0
    only_other = ["--key", other.public.raw.hex()]
    refused = run(app, ["receipts", "verify", str(export), *only_other])
    assert refused.exit_code == 1
    assert f"the key {SIGNER.key_id} is not among those that were given" in refused.stdout
    both = [*only_other, "--key", KEY]
    assert run(app, ["receipts", "verify", str(export), *both]).exit_code == 0


@pytest.mark.parametrize("key", [None, "abc", "zz" * 32, KEY[:-2], "missing.json"])
def test_without_a_key_nothing_is_verified(tmp_path, key):
    [export] = write(tmp_path, export=encode("csv", seal([make_usage()]))[0])
    options = [] if key is None else ["--key", key]
    result = CliRunner().invoke(app, ["receipts", "verify", str(export), *options])
    assert (result.exit_code, result.stdout) == (2, "")


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"hello", b"[1]", b"\xff\xfe", b'{"object": "list", "data": []}', None]
)
def test_what_is_no_export_is_exit_2_and_one_line(tmp_path, content):
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    result = verify(path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


def test_a_document_is_read_up_to_its_limit_and_refused_a_byte_beyond(tmp_path, monkeypatch):
    content = to_json(make_answer())
    good, long = write(tmp_path, good=content, long=content + b"\n")
    monkeypatch.setattr("server.cli.receipts.MAX_DOCUMENT_BYTES", len(content))
    assert [verify(path).exit_code for path in (good, long)] == [0, 2]


def test_receipts_come_to_their_statement_to_the_nano_dollar(tmp_path):
    receipts = seal(make_rows(14, 30, ["ten_1"]))
    other_month = seal([make_usage() | {"period": "2026-03"} for _ in range(2)])
    export, statement, less = write(
        tmp_path,
        export=encode("csv", receipts)[0],
        statement=make_statement(receipts),
        less=encode("csv", [*receipts[:7], *receipts[8:]])[0],
    )
    assert verify(export, "--statement", statement).exit_code == 0
    found = report(less, "--statement", statement)
    fields = {finding["field"] for finding in found["findings"]}
    assert {"num_entries", "receipts_sha256"} <= fields
    assert found["gaps"] == [{"tenant_id": "ten_1", "first_seq": 8, "last_seq": 8}]
    changed = make_statement(receipts)
    changed["statement"]["total_nanousd"] += 1
    [path] = write(tmp_path, changed=changed)
    fields = {finding["field"] for finding in report(export, "--statement", path)["findings"]}
    assert {"statement.sha256", "statement.total_nanousd", "total_nanousd"} <= fields
    [none] = write(tmp_path, none=encode("jsonl", other_month)[0])
    assert "num_entries" in {f["field"] for f in report(none, "--statement", statement)["findings"]}


def test_receipts_of_other_months_are_not_on_the_statement(tmp_path):
    rows = make_rows(15, 12, ["ten_1"])
    for row in rows[::3]:
        row["period"] = "2026-03"
    receipts = seal(rows)
    of_month = [receipt for receipt in receipts if receipt["period"] == "2026-02"]
    whole, month, statement = write(
        tmp_path,
        whole=encode("csv", receipts)[0],
        month=encode("csv", of_month)[0],
        statement=make_statement(of_month),
    )
    assert verify(whole, "--statement", statement, "--complete").exit_code == 0
    result = verify(month, "--statement", statement)
    assert result.exit_code == 0
    assert "ten_1: receipt 4 is missing here (--complete makes that an error)\n" in result.stdout
    assert verify(month, "--complete").exit_code == 1


@pytest.mark.parametrize("status", ["open", "issued"])
def test_only_an_issued_statement_can_be_verified(tmp_path, status):
    document = make_statement(seal([make_usage()]))
    if status == "open":
        document = {"object": "statement", "status": "open", "statement": document["statement"]}
    [path] = write(tmp_path, statement=document)
    result = verify(path)
    assert result.exit_code == (0 if status == "issued" else 2)
    said = "The statement holds" if status == "issued" else "the month is not over"
    assert said in result.stderr


def test_an_answers_receipt_names_the_key_that_signed_it(tmp_path):
    answer = make_answer(is_reversed=True)
    [good, bad] = write(tmp_path, good=answer, bad=answer | {"verified_with": "0" * 16})
    assert verify(good).exit_code == 0
    assert [f["field"] for f in report(bad)["findings"]] == ["verified_with"]


def test_an_answers_correction_must_be_of_its_receipt(tmp_path):
    rows = [make_usage(), make_usage()]
    receipt, other = seal(rows)
    *_, correction = seal([*rows, reverse(other)])
    answer = make_answer() | {"receipt": receipt, "corrections": [correction]}
    [path] = write(tmp_path, strange=answer)
    assert "reverses_entry_id" in {f["field"] for f in report(path)["findings"]}


def test_many_findings_are_shown_in_part_and_counted(tmp_path):
    [receipt] = seal([make_usage()])
    [path] = write(tmp_path, export=encode("jsonl", [receipt] * 50)[0])
    result = verify(path)
    assert result.exit_code == 1
    assert result.stdout.count("twice, or out of order") == 20
    assert "and 29 more findings" in result.stdout
    assert report(path)["num_findings"] == 49
