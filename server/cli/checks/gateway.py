"""Checks of a gateway that answers, of its journals, and of a real request."""

import time
from collections.abc import Callable
from pathlib import Path

import httpx

from server.cli.checks.check import Finding
from server.cli.connection import as_operator, as_tenant
from server.cli.figures import read_figures
from server.cli.units import milliseconds, moment
from server.client.http import is_loopback
from server.text.json_object import JsonObject
from server.version import VERSION, build

_TIMEOUT_S = 5.0
_READY_TODO = {
    "engine": "Look at the supervisor's log: there an engine says why it ends.",
    "ledger": "Mend the database: see its checks.",
    "serving": "This gateway is stopping: start `chorale serve` again if nobody else does.",
}
"""Remedies for each part that /ready misses."""
_WELL = ("ready", "leaving", "elsewhere")
"""States of engines that need nobody."""
_MAX_AUDIT_AGE_S = 3 * 3600
_NO_KEY = Finding("skipped", "The admin key is not here.", "Set CHORALE_ADMIN_KEY.")


def find_release(url: str) -> str | None:
    """The release and build of the gateway at this URL; None if there is none."""
    try:
        answer = _get(url, "/version").json()
        return f"{answer['version']} (build {answer['build']})"
    except (httpx.TransportError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        return None


def no_gateway(url: str, data_dir: Path, *, is_named: bool) -> Finding:
    """The finding if nobody answers.   is_named: whether the operator gave the URL."""
    found = f"No gateway answers at {url}."
    if not is_named and not (data_dir / "gateway.json").exists():
        return Finding("skipped", found, "Start `chorale serve`, and run this again.")
    todo = "Start `chorale serve`; if it should be running, its log says why it is not."
    return Finding("wrong" if is_named else "warning", found, todo)


def check_release(release: str) -> Finding:
    """Whether the gateway has this command's release."""
    own = f"{VERSION} (build {build()})"
    if release == own:
        return Finding("ok", f"The gateway and this command are {own}.")
    todo = "Restart the server with the release that is installed, or use the server's command."
    return Finding("warning", f"The gateway is {release}, this command is {own}.", todo)


def check_ready(url: str) -> Finding:
    """Whether the gateway can serve, by its own word. Raises TransportError."""
    parts = _get(url, "/ready").json()
    missing = [name for name in _READY_TODO if not parts.get(name)]
    if not missing:
        return Finding("ok", "The gateway can serve.")
    todo = " ".join(_READY_TODO[name] for name in missing)
    return Finding("wrong", f"The gateway is not ready: {', '.join(missing)}.", todo)


def check_engines(url: str, admin_key: str | None, data_dir: Path) -> Finding:
    """Whether all engines take requests. Raises CommandFailed."""
    if (engines := _operators(url, admin_key, data_dir, "engines")) is None:
        return _NO_KEY
    if silent := [_name(it) for it in engines if it["state"] == "silent"]:
        todo = (
            "Start their machine. If its volume is gone for good: `chorale engines lost ENGINE_ID`."
        )
        return Finding("wrong", f"Nobody has had {', '.join(silent)} for 5 minutes.", todo)
    if away := [f"{_name(it)} is {it['state']}" for it in engines if it["state"] not in _WELL]:
        todo = "Look at the supervisor's log if that lasts: engines say there why they end."
        return Finding("warning", "; ".join(away) + ".", todo)
    return Finding("ok", f"Engines: {len(engines)}; none is missing.")


def check_problems(url: str, admin_key: str | None, data_dir: Path) -> Finding | list[Finding]:
    """Ask the gateway itself what is wrong. Raises CommandFailed, ApiRefused."""
    if (problems := _operators(url, admin_key, data_dir, "problems")) is None:
        return _NO_KEY
    findings = [Finding("wrong", it["found"], it["todo"]) for it in problems]
    return findings or Finding("ok", "The gateway sees no problem.")


def check_journals(data_dir: Path) -> Finding:
    """Whether a segment of a journal was set aside."""
    from engine.journal.lines import SET_ASIDE
    from server.launch.engine_folders import engine_folders

    folders = engine_folders(data_dir)
    damaged = [path for folder in folders for path in folder.glob(f"journal/*{SET_ASIDE}")]
    if not damaged:
        return Finding("ok", f"Engines with journals here: {len(folders)}; none is damaged.")
    todo = "Run `chorale audit`, which names the requests that are lost, and keep the file."
    return Finding("warning", f"{', '.join(map(str, damaged))} was set aside as damaged.", todo)


def check_audit(url: str, now_s: Callable[[], float] = time.time) -> Finding:
    """Whether ledger and journals agreed lately, by all gateways there. Raises TransportError."""
    if not (at_s := read_figures(_get(url, "/metrics").text).get("audited at")):
        return Finding("skipped", "This gateway has had no audit without a difference.")
    found = f"The last audit without a difference was at {moment(int(at_s))}."
    if now_s() - at_s > _MAX_AUDIT_AGE_S:
        return Finding("warning", found, "Look for lines about the audit in the gateways' logs.")
    return Finding("ok", found)


def check_request(url: str, api_key: str | None, model: str) -> Finding:
    """Whether one token comes. Raises CommandFailed."""
    if not api_key:
        todo = "Set CHORALE_API_KEY to a tenant's key, who pays for one token."
        return Finding("skipped", "No tenant's key was given.", todo)
    body: JsonObject = {"model": model, "prompt": "Hello", "max_tokens": 1, "stream": True}
    began_s = time.monotonic()
    with as_tenant(url, api_key, read_timeout_s=_TIMEOUT_S) as client:
        times_s = [time.monotonic() for _ in client.stream("/v1/completions", body)]
    took = milliseconds(times_s[0] - began_s)
    return Finding("ok", f"The first token of {model} came after {took}.")


def _operators(url: str, key: str | None, data_dir: Path, what: str) -> list[JsonObject] | None:
    """A list for the operator; None without an admin key. Raises CommandFailed."""
    if not key and not (data_dir / "admin.key").exists():
        return None
    with as_operator(url, key, data_dir, read_timeout_s=_TIMEOUT_S) as client:
        found: list[JsonObject] = client.request("GET", f"/admin/v1/{what}")["data"]
    return found


def _name(engine: JsonObject) -> str:
    return str(engine["name"] or engine["engine_id"])


def _get(url: str, path: str) -> httpx.Response:
    # The proxy that the environment names must not be asked for this machine's own address.
    return httpx.get(url.rstrip("/") + path, timeout=_TIMEOUT_S, trust_env=not is_loopback(url))
