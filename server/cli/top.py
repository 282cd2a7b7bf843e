"""`chorale top`: what the engines, base models and tenants do now, drawn again every few seconds.

`poll` asks the gateway, `view` computes the figures of two answers, and `draw` lays them out.
"""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from server.cli.connection import (
    DEFAULT_DATA_DIR,
    DEFAULT_URL,
    AdminKey,
    DataDir,
    Json,
    Url,
    as_operator,
)
from server.cli.figures import Figures, read_figures
from server.cli.terminal import CommandFailed, show_json
from server.cli.units import megabytes, moment
from server.text.json_object import JsonObject

if TYPE_CHECKING:
    from server.client.http import Client

_READ_TIMEOUT_S = 5.0
_RECENT_S = 300
"""Seconds of usage by which tenants are ordered."""
_MOST_TENANTS = 5
_BAR = 20
_ARENA = {"kv": "█", "prefix": "▓", "adapters": "▒", "free": "░"}
# Columns of the engines' table, each with the least width of a terminal that has it.
_COLUMNS = {
    "engine": 0, "base": 100, "state": 0, "run": 0, "wait": 0, "batch": 90, "tok/s": 0,
    "hits": 60, "arena": 75,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a gateway said at one moment.   at_s: by a clock that never jumps.   tenants: usage."""

    at_s: float
    engines: list[JsonObject]
    models: list[JsonObject]
    tenants: list[JsonObject]
    figures: Figures


def top(
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 2.0,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    json: Json = False,
) -> None:
    """Show what engines, base models and tenants do now, until Ctrl-C; --json shows it once.

    arena: memory of running requests (█), of prompts kept for later ones (▓), of adapters (▒), and
    free (░). hits: share of prompt tokens that the prefix cache had. Tenants: by tokens of requests
    that ended in the last 5 minutes.
    """
    if not json and not sys.stdout.isatty():
        raise CommandFailed("There is no terminal to draw on; give --json.", exit_code=2)
    with as_operator(url, admin_key, data_dir, read_timeout_s=_READ_TIMEOUT_S) as client:

        @cache
        def name_of(tenant_id: str) -> str:
            return str(client.request("GET", f"/admin/v1/tenants/{tenant_id}")["name"])

        def ask() -> Snapshot:
            return poll(client, name_of)

        if json:
            show_json(view(ask()))
            return
        console = Console()
        with Live(console=console, screen=True, auto_refresh=False) as live:
            watch(ask, lambda it: live.update(draw(it, console.width), refresh=True), interval)


def watch(
    ask: Callable[[], Snapshot],
    show: Callable[[JsonObject | str], None],
    interval_s: float,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Show the figures again and again until Ctrl-C, or a sentence while nobody answers.

    Raises ApiRefused if the key is refused.
    """
    from server.client.http import ClientError

    before = None
    try:
        while True:
            try:
                now = ask()
                show(view(now, before))
                before = now
            except ClientError as error:
                if not error.is_passing:
                    raise
                show(f"{error} It is asked again every {interval_s:g} s.")
            wait(interval_s)
    except KeyboardInterrupt:
        return


def poll(client: "Client", name_of: Callable[[str], str]) -> Snapshot:
    """Ask the gateway.   name_of: the name of a tenant by its id. Raises ClientError."""
    recent = {"start": str(int(time.time()) - _RECENT_S), "group_by": "tenant"}
    usage = client.request("GET", "/admin/v1/usage", params=recent)["data"]
    most = sorted(usage, key=_num_tokens, reverse=True)[:_MOST_TENANTS]
    return Snapshot(
        at_s=time.monotonic(),
        engines=client.request("GET", "/admin/v1/engines")["data"],
        models=client.request("GET", "/admin/v1/models")["data"],
        tenants=[{**it, "tenant": name_of(it["tenant"])} for it in most],
        figures=read_figures(b"".join(client.download("/metrics", {})).decode()),
    )


def view(now: Snapshot, before: Snapshot | None = None) -> JsonObject:
    """The figures of a snapshot; rates are None without one before it."""
    earlier = {(it["engine_id"], it["starts"]): it for it in (before.engines if before else ())}
    past_s = now.at_s - before.at_s if before else 0.0
    tenant = ("tenant", "num_requests", "num_failed_requests", "prompt_tokens", "completion_tokens")
    gateway = {
        "settler_lag_records": now.figures.get("settler lag"),
        "unsettled_records": now.figures.get("unsettled"),
        "last_audit_at": now.figures.get("audited at"),
        "audit_findings": now.figures.get("audit findings", sum),
        "limits_degraded": now.figures.get("limits degraded"),
        "engine_deaths": now.figures.get("engine deaths", sum),
    }
    return {
        "engines": [
            _engine(it, earlier.get((it["engine_id"], it["starts"])), past_s) for it in now.engines
        ],
        "models": [
            {name: it[name] for name in ("name", "state", "engines", "requests_here")}
            for it in now.models
        ],
        "tenants": [{name: it[name] for name in tenant} for it in now.tenants],
        "gateway": gateway,
    }


def draw(it: JsonObject | str, width: int) -> RenderableType:
    """Lay the figures of `view` out, or a sentence.   width: of the terminal, in characters."""
    if isinstance(it, str):
        return Text(it, style="red")
    columns = [name for name, least in _COLUMNS.items() if width >= least]
    tiers = ("device", "host", "disk")
    in_tiers = [
        {"adapters": one["name"], **{name: megabytes(one["tiers"].get(name, 0)) for name in tiers}}
        for one in it["engines"]
    ]
    tenants = [
        {"tenant": one["tenant"], "ended": one["num_requests"], "failed": one["num_failed_requests"],
         "tokens": _num_tokens(one)}
        for one in it["tenants"]
    ]  # fmt: skip
    models = [
        {**one, "model": one["name"], "running": one["requests_here"]} for one in it["models"]
    ]
    return Group(
        _table(columns, map(_row, it["engines"])),
        _table(("model", "state", "engines", "running"), models),
        _table(("adapters", *tiers), in_tiers),
        _table(("tenant", "ended", "failed", "tokens"), tenants),
        Text(_sentence(it["gateway"])),
    )


def _engine(engine: JsonObject, before: JsonObject | None, past_s: float) -> JsonObject:
    names = ("name", "base_model", "machine", "state")
    found: JsonObject = {name: engine[name] for name in names}
    found["name"] = found["name"] or engine["engine_id"]
    figures, earlier = engine["figures"], before and before["figures"]
    for name in ("running", "waiting", "batch_tokens"):
        found[name] = figures and figures[name]
    found |= {"tokens_per_s": None, "prefix_hit_rate": None, "arena": {}, "tiers": {}}
    if not figures:
        return found
    if earlier and past_s > 0:
        made = figures["completion_tokens"] - earlier["completion_tokens"]
        found["tokens_per_s"] = round(made / past_s, 1)
    if figures["prompt_tokens"]:
        found["prefix_hit_rate"] = round(figures["cached_tokens"] / figures["prompt_tokens"], 3)
    found["arena"] = _arena(figures)
    found["tiers"] = {it["tier"]: it["used_bytes"] for it in figures["tiers"]}
    return found


def _arena(figures: JsonObject) -> dict[str, float]:
    """Shares of an engine's slabs, which add up to 1."""
    slabs = {name: figures[f"{name}_slabs"] for name in ("prefix", "adapter", "free")}
    total = max(1, figures["total_slabs"])
    kv = max(0, total - sum(slabs.values()))
    shares = {"kv": kv, "prefix": slabs["prefix"], "adapters": slabs["adapter"]}
    return {name: round(num / total, 3) for name, num in {**shares, "free": slabs["free"]}.items()}


def _row(engine: JsonObject) -> JsonObject:
    rate, hits = engine["tokens_per_s"], engine["prefix_hit_rate"]
    bar = "".join(_ARENA[name] * round(_BAR * part) for name, part in engine["arena"].items())
    return {
        "engine": engine["name"], "base": engine["base_model"], "state": engine["state"],
        "run": engine["running"], "wait": engine["waiting"], "batch": engine["batch_tokens"],
        "tok/s": None if rate is None else f"{rate:,.0f}",
        "hits": None if hits is None else f"{hits:.0%}", "arena": bar,
    }  # fmt: skip


def _table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for row in rows:
        cells = (row.get(name) for name in columns)
        table.add_row(*(Text("-" if it in (None, "") else str(it)) for it in cells))
    return table


def _sentence(gateway: JsonObject) -> str:
    at_s, lag = gateway["last_audit_at"], gateway["settler_lag_records"]
    said = [f"settler behind by {lag or 0:,.0f} records"]
    said.append(f"last good audit {moment(int(at_s))}" if at_s else "no good audit yet")
    if gateway["audit_findings"]:
        said.append(f"{gateway['audit_findings']:,.0f} findings: run chorale audit")
    if gateway["limits_degraded"]:
        said.append("limits are counted without Redis")
    return "; ".join(said)


def _num_tokens(usage: JsonObject) -> int:
    return int(usage["prompt_tokens"] + usage["completion_tokens"])
