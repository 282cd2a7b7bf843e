"""`chorale top`: what engines, base models and tenants do now, drawn again every few seconds."""

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from server.cli.figures import NAMES, read_figures
from server.cli.terminal import CommandFailed, show_json
from server.cli.units import megabytes, moment
from server.text.json_object import JsonObject

if TYPE_CHECKING:
    from server.client.http import Client

READ_TIMEOUT_S = 5.0
_RECENT_S = 300
"""Seconds of usage by which tenants are ordered."""
_MOST_TENANTS = 5
_BAR = 20
_ARENA = {"kv": "█", "prefix": "▓", "adapters": "▒", "free": "░"}
_TIERS = ("device", "host", "disk")
# Columns, each with the least width of a terminal that has it.
_ENGINE = {
    "name": 0, "base_model": 100, "state": 0, "running": 0, "waiting": 0, "batch_tokens": 120,
    "tokens/s": 0, "prefix_hits": 66, "arena": 78,
}  # fmt: skip
_MODEL = dict.fromkeys(("name", "state", "engines", "requests_here"), 0)
_TENANT = {
    "tenant": 0, "num_requests": 0, "num_failed_requests": 80, "prompt_tokens": 60,
    "completion_tokens": 0,
}  # fmt: skip
_ADAPTERS = dict.fromkeys(("adapters", *_TIERS), 0)


def top(
    client: "Client",
    json: bool,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 2.0,
) -> None:
    """Show what engines, base models and tenants do now, until Ctrl-C; --json shows it once.

    arena: KV of running requests (█), of prompts kept for later ones (▓), adapters (▒), free (░).
    prefix_hits: share of prompt tokens that the prefix cache had. Tenants are those with the most
    tokens in requests that ended in the last 5 minutes.
    """
    if not json and not sys.stdout.isatty():
        raise CommandFailed("There is no terminal to draw on; give --json.", exit_code=2)
    name_of = cache(lambda one: client.request("GET", f"/admin/v1/tenants/{one}")["name"])
    if json:
        show_json(poll(client, name_of))
        return
    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        watch(
            lambda: poll(client, name_of),
            lambda *looks: live.update(draw(*looks, width=console.width), refresh=True),
            lambda problem: live.update(Text(problem, style="red"), refresh=True),
            lambda: time.sleep(interval),
        )


def watch(
    ask: Callable[[], JsonObject],
    show: Callable[[JsonObject, JsonObject | None], None],
    say: Callable[[str], None],
    wait: Callable[[], None],
) -> None:
    """Show each look beside the one before it until Ctrl-C, or say that nobody answers.

    Raises ClientError if asking again is in vain, as with a wrong key.
    """
    from server.client.http import ClientError

    before = None
    try:
        while True:
            try:
                now = ask()
                show(now, before)
                before = now
            except ClientError as error:
                if not error.is_passing:
                    raise
                say(f"{error} It will be asked again.")
            wait()
    except KeyboardInterrupt:
        return


def poll(client: "Client", name_of: Callable[[str], str]) -> JsonObject:
    """One look at the gateway.   name_of: name of a tenant by its id. Raises ClientError."""

    def get(what: str, **params: Any) -> list[JsonObject]:
        found: list[JsonObject] = client.request("GET", f"/admin/v1/{what}", params=params)["data"]
        return found

    at = time.time()
    usage = sorted(get("usage", start=int(at) - _RECENT_S, group_by="tenant"), key=_num_tokens)
    figures = read_figures(b"".join(client.download("/metrics", {})).decode())
    return {
        "at": at,
        "engines": [_engine(it) for it in get("engines")],
        "models": [{name: it[name] for name in _MODEL} for it in get("models")],
        "tenants": [
            {name: it[name] for name in _TENANT} | {"tenant": name_of(it["tenant"])}
            for it in usage[: -_MOST_TENANTS - 1 : -1]
        ],
        "gateway": {word.replace(" ", "_"): figures.get(word) for word in NAMES},
    }


def draw(now: JsonObject, before: JsonObject | None = None, *, width: int) -> RenderableType:
    """Lay a look out; tokens per second are since the look before it.   width: in characters."""
    past_s = now["at"] - before["at"] if before else 0.0
    made = {_start(it): it["completion_tokens"] for it in (before or {}).get("engines", ())}
    engines = [
        {**it, "tokens/s": _rate(it["completion_tokens"], made.get(_start(it)), past_s)}
        for it in now["engines"]
    ]
    gateway = dict(now["gateway"])
    at = gateway.pop("audited_at")
    facts = [f"last good audit: {moment(int(at)) if at else 'none yet'}"]
    facts += [f"{name.replace('_', ' ')}: {_cell(name, it)}" for name, it in gateway.items()]
    tiers = [{"adapters": it["name"], **it["tiers"]} for it in engines]
    return Group(
        _table(_ENGINE, engines, width),
        _table(_ADAPTERS, tiers, width),
        _table(_MODEL, now["models"], width),
        _table(_TENANT, now["tenants"], width),
        Text("; ".join(facts)),
    )


def _engine(engine: JsonObject) -> JsonObject:
    """An engine's figures; those of an engine that is away are None."""
    figures = engine["figures"] or {}
    found = {name: engine[name] for name in ("name", "base_model", "machine", "state", "starts")}
    found["name"] = engine["name"] or engine["engine_id"]
    for name in ("running", "waiting", "batch_tokens", "completion_tokens"):
        found[name] = figures.get(name)
    prompt_tokens = figures.get("prompt_tokens")
    found["prefix_hits"] = figures["cached_tokens"] / prompt_tokens if prompt_tokens else None
    found["tiers"] = {it["tier"]: it["used_bytes"] for it in figures.get("tiers", ())}
    return found | {"arena": _arena(figures) if figures.get("total_slabs") else None}


def _arena(figures: JsonObject) -> dict[str, float]:
    """Shares of an engine's slabs, which add up to 1."""
    found = {"prefix": "prefix_slabs", "adapters": "adapter_slabs", "free": "free_slabs"}
    shares = {name: figures[slabs] / figures["total_slabs"] for name, slabs in found.items()}
    return {"kv": max(0.0, 1.0 - sum(shares.values())), **shares}


def _start(engine: JsonObject) -> tuple[str, str, int]:
    """The start of an engine, from which its counters count. Every machine has the same names."""
    return engine["machine"], engine["name"], engine["starts"]


def _rate(now: int | None, before: int | None, past_s: float) -> float | None:
    """Tokens per second; None if unknown, as after a start that nobody counts."""
    if now is None or before is None or past_s <= 0 or now < before:
        return None
    return (now - before) / past_s


def _num_tokens(usage: JsonObject) -> int:
    return int(usage["prompt_tokens"] + usage["completion_tokens"])


def _table(columns: Mapping[str, int], rows: Iterable[JsonObject], width: int) -> Table:
    names = [name for name, least_width in columns.items() if width >= least_width]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in names:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(_cell(name, row.get(name))) for name in names))
    table.add_row()
    return table


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "arena":
        # A part is seen however small it is.
        parts = (_ARENA[part] * math.ceil(_BAR * share) for part, share in value.items())
        return "".join(parts)[:_BAR]
    if name == "prefix_hits":
        return f"{value:.0%}"
    if name in _TIERS:
        return megabytes(value)
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)
