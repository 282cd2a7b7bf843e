"""`chorale receipts`: checks receipts, exports and statements without a server or a database."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from registry.extras import ExtraMissing
from server.cli.connection import Json
from server.cli.terminal import CommandFailed, say, show, show_json
from server.text.json_object import JsonObject

if TYPE_CHECKING:
    from pydantic import BaseModel

    from server.billing.receipts.check import Gap, ReceiptCheck, TenantSummary
    from server.billing.receipts.signing import PublicKey

app = typer.Typer(no_args_is_help=True, help="Receipts: proofs of what was charged.")

MAX_DOCUMENT_BYTES = 16 << 20
_SHOWN = 20


@app.callback()
def receipts() -> None:
    """Keep `receipts` a group of commands, though it has only one."""


@app.command("verify")
def verify(
    file: Annotated[
        Path,
        typer.Argument(help="File with an export, a receipt, a request's attempts or a statement."),
    ],
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="Public key in hex, or a file with the answer of /v1/receipts/keys; repeatable."
        ),
    ] = None,
    statement: Annotated[
        Path | None,
        typer.Option(help="File with the month's statement that the receipts must add up to."),
    ] = None,
    complete: Annotated[
        bool,
        typer.Option("--complete", help="Fail if a receipt is missing before the last one."),
    ] = False,
    json: Json = False,
) -> None:
    """Check receipts offline: hashes, signatures, chain and every amount.

    Exit code 1: something is wrong. Exit code 2: a file cannot be read. With `--statement` the sums
    are checked against a month's statement as well.
    """
    from server.api.receipt_models import LedgerEntry, SignedReceipt
    from server.billing.receipts.check import ReceiptCheck

    keys = _read_keys(key or [])
    stated = None if statement is None else _issued(statement, _read_document(statement) or {})
    check = ReceiptCheck(keys, is_complete=complete, statement=stated and stated["statement"])
    if stated is not None:
        _check_statement(check, stated, keys)
    document = _read_document(file)
    if document is None:
        _check_export(check, file)
    elif document["object"] == "receipt":
        _check_receipts(check, [document])
    elif document["object"] == "entry":
        _check_names(document, LedgerEntry)
        check.add(1, {name: document[name] for name in SignedReceipt.model_fields})
    elif document["object"] == "list" and type(data := document.get("data")) is list and data:
        _check_receipts(check, data)
    elif document["object"] == "statement" and stated is None:
        _check_statement(check, _issued(file, document), keys)
    else:
        raise CommandFailed(f"{file} is neither an export nor a receipt nor a statement.", 2)
    check.finish()
    _report(check, json)
    if check.num_findings:
        raise typer.Exit(1)


# ---- what is read ----


def _read_keys(given: list[str]) -> dict[str, "PublicKey"]:
    """Public keys, by key id. Raises CommandFailed."""
    from server.billing.receipts.signing import PublicKey

    texts: list[str] = []
    for text in given:
        if Path(text).is_file():
            try:
                document = _read_document(Path(text)) or {}
                texts += [str(item["public_key"]) for item in document["data"]]
            except (LookupError, TypeError):
                raise CommandFailed(f"{text} is no answer of /v1/receipts/keys.", 2) from None
        else:
            texts.append(text)
    if not texts:
        raise CommandFailed("Give the public key: --key HEX, or the file of /v1/receipts/keys.", 2)
    try:
        keys = [PublicKey(bytes.fromhex(text)) for text in texts]
    except ValueError:
        raise CommandFailed("A public key is 32 bytes in hex; there is no such file.", 2) from None
    if any(len(key.raw) != 32 for key in keys):
        raise CommandFailed("A public key is 32 bytes in hex.", 2)
    return {key.key_id: key for key in keys}


def _read_document(path: Path) -> JsonObject | None:
    """The answer of the API in a file; None if the file holds none. Raises CommandFailed."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise CommandFailed(f"{path}: {error.strerror}.", 2) from None
    if len(content) > MAX_DOCUMENT_BYTES:
        return None
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and "object" in document else None


def _issued(path: Path, document: JsonObject) -> JsonObject:
    """The document, checked to be a statement with its seal. Raises CommandFailed."""
    from server.api.receipt_models import IssuedStatement

    is_issued = document.get("object") == "statement" and document.get("status") == "issued"
    if document.get("status") == "open":
        problem = "the month is not over, so its statement has no seal yet. Fetch it again then."
        raise CommandFailed(f"{path}: {problem}", 2)
    names = IssuedStatement.model_fields.keys()
    if not is_issued or document.keys() != names or not isinstance(document["statement"], dict):
        raise CommandFailed(f"{path} is no issued statement: /v1/statements/PERIOD gives one.", 2)
    return document


# ---- what is checked ----


def _check_export(check: "ReceiptCheck", path: Path) -> None:
    from server.billing.exports.reading import ExportUnreadable, read_export

    try:
        for row, receipt in enumerate(read_export(path), start=1):
            check.add(row, receipt)
    except (ExportUnreadable, ExtraMissing, OSError) as error:
        raise CommandFailed(f"{path}: {error}", 2) from None
    if not check.num_receipts:
        raise CommandFailed(f"{path}: there is no receipt in it.", 2)


def _check_receipts(check: "ReceiptCheck", answers: list[Any]) -> None:
    """Check receipts of one request as the API answers them, each with its corrections.

    A row is a receipt or a correction, in the order of the file.
    """
    from server.api.receipt_models import ReceiptAnswer, SignedReceipt

    rows, found, requests = count(1), [], set()
    for answer in answers:
        _check_names(answer, ReceiptAnswer)
        corrections = answer["corrections"]
        for fields in (answer["receipt"], *(corrections if type(corrections) is list else [None])):
            _check_names(fields, SignedReceipt)
        found.append((answer, next(rows), [(next(rows), it) for it in corrections]))
    # Attempts are in the order in which they began, receipts in that in which they were settled.
    found.sort(key=lambda it: str(it[0]["receipt"]["receipt_seq"]).zfill(20))
    for answer, row, corrections in found:
        receipt, parent_id = answer["receipt"], answer["parent_id"]
        check.add(row, receipt)
        if answer["verified_with"] != receipt["signing_key"]:
            check.note("verified_with", "it is not the key that the receipt names")
        if parent_id not in (None, str(receipt["request_id"]).rpartition(".")[0]):
            check.note("parent_id", "the receipt's request_id is no attempt of this request")
        requests.add(parent_id or receipt["request_id"])
        for correction_row, correction in corrections:
            check.add_reversal(correction_row, receipt, correction)
    if len(requests) > 1:
        check.note("request_id", f"the receipts are of {len(requests)} requests, not of one")


def _check_names(fields: Any, model: "type[BaseModel]") -> None:
    """Check that an object has the fields that the API's answers have. Raises CommandFailed."""
    if not isinstance(fields, dict) or fields.keys() != model.model_fields.keys():
        raise CommandFailed("It is no receipt as the API answers it.", 2)


def _check_statement(
    check: "ReceiptCheck", document: JsonObject, keys: Mapping[str, "PublicKey"]
) -> None:
    from server.billing.receipts.check import statement_faults

    sealed = document["statement"], document["sha256"], document["signature"]
    for field, message in statement_faults(*sealed, keys):
        check.note(f"statement.{field}" if field else "statement", message)


# ---- what is said ----


def _report(check: "ReceiptCheck", as_json: bool) -> None:
    from server.billing.rating import format_usd

    if as_json:
        show_json(
            {
                "is_good": not check.num_findings,
                "num_receipts": check.num_receipts,
                "num_findings": check.num_findings,
                "findings": [asdict(finding) for finding in check.findings],
                "gaps": [asdict(gap) for gap in check.gaps],
                "tenants": {id: _sums(tenant) for id, tenant in check.tenants.items()},
            }
        )
        return
    for finding in check.findings[:_SHOWN]:
        show(str(finding))
    if check.num_findings > _SHOWN:
        show(f"and {check.num_findings - _SHOWN} more findings: --json has up to 1,000")
    for tenant_id, tenant in list(check.tenants.items())[:_SHOWN]:
        tokens = ", ".join(f"{name} {count:,}" for name, count in tenant.tokens.items())
        amounts = ", ".join(
            f"{kind} {format_usd(amount)}" for kind, amount in sorted(tenant.amounts.items())
        )
        seqs = f"{tenant.first_seq} to {tenant.last_seq}"
        show(f"{tenant_id}: {tenant.num_receipts:,} receipts, {seqs}")
        show(f"  {tokens}")
        show(f"  {amounts}; total {format_usd(tenant.total_nanousd)} USD")
    for gap in check.gaps[:_SHOWN]:
        show(_gap(gap))
    if check.num_findings:
        say(f"[red]{check.num_findings} findings[/red] in {check.num_receipts:,} receipts.")
    elif not check.num_receipts:
        say("The statement holds: hash, signature, sums.")
    else:
        say(f"All {check.num_receipts:,} receipts hold: hash, signature, chain, amounts.")


def _gap(gap: "Gap") -> str:
    which = f"receipt {gap.first_seq} is"
    if gap.num_receipts > 1:
        which = f"receipts {gap.first_seq} to {gap.last_seq} are"
    return f"{gap.tenant_id}: {which} missing here (--complete makes that an error)"


def _sums(tenant: "TenantSummary") -> JsonObject:
    return {
        "num_receipts": tenant.num_receipts,
        "num_missing": tenant.num_missing,
        "first_seq": tenant.first_seq,
        "last_seq": tenant.last_seq,
        **tenant.tokens,
        "amounts_nanousd": tenant.amounts,
        "total_nanousd": tenant.total_nanousd,
    }
