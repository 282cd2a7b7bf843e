"""Checks of what the server reads at its start: secrets, files with keys, models, its address."""

import os
from collections.abc import Callable
from pathlib import Path

from server.cli.checks.check import Finding
from server.launch.settings import Settings


def check_secrets(settings: Settings) -> Finding:
    """Whether the secrets are there. Raises SecretError."""
    from server.database.database import DEFAULT_FILE
    from server.launch.prepare import shares_parts
    from server.launch.secrets import SecretMissing, Secrets

    try:
        Secrets.load(settings.data_dir, may_make=False)
    except SecretMissing as error:
        if shares_parts(settings):
            raise
        if not (settings.data_dir / DEFAULT_FILE).exists():
            return Finding("ok", "The first start makes them.")
        return Finding(
            "wrong",
            f"{error.path} is gone, and the ledger is there.",
            "Put the file back from a backup before you start: with a new one, every API key is "
            "refused, and receipts have another signature.",
        )
    return Finding("ok", "Pepper and signing key are there.")


def check_private_files(data_dir: Path) -> Finding:
    """Whether nobody else can read the files with keys, and this user is the server's."""
    patterns = ("admin.key", "secrets/[!.]*", "gateway*.json", "chorale.db")
    files = [path for pattern in patterns for path in sorted(data_dir.glob(pattern))]
    if is_open := [str(path) for path in files if path.stat().st_mode & 0o077]:
        names = " ".join(is_open)
        todo = f"Run chmod 600 {names}. If others use this machine, replace what is in them."
        return Finding("wrong", f"Others may read {names}.", todo)
    if data_dir.exists() and data_dir.stat().st_uid != os.geteuid():
        todo = f"Run it again as the owner of {data_dir}: other checks say what this user may do."
        return Finding("warning", "The server's files belong to another user.", todo)
    return Finding("ok", f"Nobody else can read files with keys (found: {len(files)}).")


def check_model(one: Settings) -> Finding:
    """Whether a base model's files are there and whole; weights are not read.

    one: settings of this model. Raises UnsupportedBaseModel, UnsupportedTokenizer, OSError.
    """
    from registry.base.base_model import read_headers
    from server.text.tokenizer import Tokenizer

    folder = Path(one.model).expanduser()
    if not folder.is_dir():
        todo = "If it is a hub id, `chorale serve` downloads it. If it is a folder, mend `model`."
        return Finding("warning", f"{one.model} is no folder here.", todo)
    _, headers, _ = read_headers(folder)
    Tokenizer(folder)
    return Finding("ok", f"{folder} has config, tokenizer and weights (files: {len(headers)}).")


def check_port(settings: Settings, find_release: Callable[[], str | None]) -> Finding:
    """Whether the port is free, or a gateway's that answers."""
    from server.launch.errors import AddressInUse
    from server.launch.prepare import free_port

    where = f"{settings.host}:{settings.port}"
    try:
        free_port(settings.host, settings.port)
    except AddressInUse as error:
        if find_release() is not None:
            return Finding("ok", f"A gateway listens on {where}.")
        todo = (
            "See who listens there (ss -ltnp). A gateway that hangs: kill it, and `chorale serve` "
            "starts another. Anybody else: end it, or set another port."
        )
        return Finding("wrong", f"{error} Who listens there answers as no gateway.", todo)
    return Finding("ok", f"{where} is free.")
