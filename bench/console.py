"""`python -m bench.console`: prints JSON lines with the time that the console's pages take.

A page is bounded by its queries, which must not grow with what the installation has stored: the
pages of the largest tenant of a large installation stand beside those of a tenant with little. The
pages are asked of a gateway in this process, without an engine.
"""

import argparse
import asyncio
import hashlib
import json
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from bench.billing.days import fill_days
from bench.billing.measurement import Measurement
from bench.databases import DATABASES
from bench.experiment import replace_rows
from bench.report import describe_machine, json_line, rounded
from registry.tables import adapter_aliases, adapter_versions, adapters, alias_moves
from server.accounts.admin_key import AdminKey
from server.accounts.auth import SCOPES
from server.accounts.keys import create_key
from server.accounts.tenants import create_tenant
from server.api.app import create_app
from server.api.gateway import Gateway
from server.assembly import assemble
from server.billing.prices import ensure_price
from server.billing.tables import (
    entries,
    monthly_spend,
    tenant_accounts,
    usage_events,
    usage_rollups,
)
from server.console.mounting import mount
from server.launch.settings import Settings
from server.pool.base_files import BaseEntry

_DEMO = Path(__file__).parent.parent / "demo" / "model"
_ADMIN_KEY = "the-operator"
_DAYS, _DAY_MS, _HOUR_MS = 30, 86_400_000, 3_600_000
_ROWS_AT_ONCE = 5000
_RUNS = 5

TENANT_PAGES = (
    "/console", "/console?by=key", "/console?model=adapter-0", "/console/spend.csv?by=key",
    "/console/requests", "/console/requests?model=adapter-0", "/console/requests?outcome=failed",
    "/console/requests/{newest}", "/console/adapters", "/console/adapters/adapter-0",
    "/console/keys", "/console/bill", "/console/webhooks", "/console/playground",
)  # fmt: skip
OPERATOR_PAGES = (
    "/console/operator", "/console/operator/tenants", "/console/operator/tenants/tenant-0",
    "/console/operator/prices", "/console/operator/requests", "/console/operator/incidents",
    "/console/operator/audit",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Console(Measurement):
    """Milliseconds of each page: in its queries, and in all.

    receipts, adapters: of all tenants together; the k-th tenant has a k-th of what the first has,
    and its adapters are used in the same way. They are spread over thirty days.
    """

    database: str
    receipts: int = 1_000_000
    adapters: int = 10_000
    tenants: int = 1_000

    def measure(self, folder: Path) -> dict[str, Any]:
        with DATABASES[self.database](folder / "database") as url:
            gateway = _gateway(folder, url)
            try:
                gateway.database.migrate()
                keys = _World(self, int(time.time() * 1000)).fill(gateway, sa.create_engine(url))
                return asyncio.run(_Asker(gateway, keys).measure())
            finally:
                gateway.database.close()


def _gateway(folder: Path, url: str) -> Gateway:
    settings = Settings(model=str(_DEMO), data_dir=folder / "data", database_url=url)
    settings.data_dir.mkdir()
    entry = BaseEntry(
        name=settings.model_id,
        home=str(settings.data_dir),
        model_dir=settings.model,
        settings=settings.dump_base(),
    )
    return assemble(settings, [entry], AdminKey(_ADMIN_KEY))


class _World:
    """Fills a database with what an installation of the setup's size has.

    The rows are inserted without the ledger, which would sign each of them.
    """

    def __init__(self, setup: Console, now_ms: int) -> None:
        self._setup = setup
        self._start_ms = now_ms - _DAYS * _DAY_MS
        self._chance = random.Random(0)

    def fill(self, gateway: Gateway, engine: sa.Engine) -> dict[str, str]:
        """Returns the keys of the largest tenant and of the smallest, and the operator's."""
        database = gateway.database
        ids = database.write_sync(self._make_tenants)
        keys = {
            name: database.write_sync(
                lambda conn, t=tenant_id: create_key(
                    conn, t, "a key", gateway.pepper, scopes=SCOPES, now_ms=self._start_ms
                )
            )[1]
            for name, tenant_id in (("largest", ids[0]), ("smallest", ids[-1]))
        }
        revision = gateway.bases.default.model.base_revision
        with engine.begin() as conn:
            num_adapters = _zipf(self._setup.adapters, len(ids))
            for tenant_id, count in zip(ids, num_adapters, strict=True):
                for table, rows in self._adapters(tenant_id, count, revision).items():
                    _insert(conn, table, iter(rows))
            self._insert_usage(conn, ids, num_adapters)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
            # Databases do this themselves, some time after so many rows were added.
            conn.execute(sa.text("ANALYZE"))
        engine.dispose()
        return keys | {"operator": _ADMIN_KEY}

    def _make_tenants(self, conn: Connection) -> list[str]:
        ensure_price(conn, self._start_ms)
        names = (f"tenant-{number}" for number in range(self._setup.tenants))
        return [create_tenant(conn, name, now_ms=self._start_ms).tenant_id for name in names]

    def _adapters(self, tenant_id: str, count: int, revision: str) -> dict[sa.Table, list[Any]]:
        rows: dict[sa.Table, list[Any]] = defaultdict(list)
        passport = json.dumps(_PASSPORT)
        for number in range(count):
            adapter_id = f"ad_{_digest(f'{tenant_id} {number}')[:32]}"
            own = {"adapter_id": adapter_id, "tenant_id": tenant_id}
            at_ms = self._start_ms
            rows[adapters].append(own | {"name": f"adapter-{number}", "created_at_ms": at_ms})
            rows[adapter_versions].append(
                own
                | {
                    "version": 1, "digest": _digest(adapter_id), "object_key": adapter_id,
                    "rank": 16, "size_bytes": 10**7, "base_revision": revision,
                    "passport": passport, "state": "ready", "created_at_ms": at_ms,
                    "created_by_key": "key",
                }
            )  # fmt: skip
            alias = own | {"alias": "latest", "version": 1}
            rows[adapter_aliases].append(alias | {"updated_at_ms": at_ms})
            rows[alias_moves].append(alias | {"moved_at_ms": at_ms, "moved_by": "key"})
        return rows

    def _insert_usage(self, conn: Connection, ids: list[str], num_adapters: list[int]) -> None:
        """Insert entries with their events, and the sums over them."""
        counts = _zipf(self._setup.receipts, len(ids))
        of_tenant = [number for number, count in enumerate(counts) for _ in range(count)]
        self._chance.shuffle(of_tenant)
        sums = _Sums()
        step_ms = _DAYS * _DAY_MS / len(of_tenant)

        def rows() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
            seqs: Counter[int] = Counter()
            for entry_id, tenant in enumerate(of_tenant, start=1):
                seqs[tenant] += 1
                at_ms = int(self._start_ms + entry_id * step_ms)
                # The most used adapter of a tenant is as far ahead of the others as the largest
                # tenant is of the others.
                number = int(num_adapters[tenant] ** self._chance.random()) - 1
                yield _usage(entry_id, ids[tenant], seqs[tenant], number, at_ms, self._chance)

        pairs = rows()
        while block := [pair for pair, _ in zip(pairs, range(_ROWS_AT_ONCE), strict=False)]:
            conn.execute(sa.insert(entries), [entry for entry, _ in block])
            conn.execute(sa.insert(usage_events), [event for _, event in block])
            for entry, event in block:
                sums.add(entry, event)
        for table, found in sums.rows():
            _insert(conn, table, found)
        fill_days(conn)


def _usage(
    entry_id: int, tenant_id: str, seq: int, adapter: int, at_ms: int, chance: random.Random
) -> tuple[dict[str, Any], dict[str, Any]]:
    """An entry of the ledger and its event."""
    completion, is_failed = chance.randrange(1, 800), chance.random() < 0.001
    digest = _digest(f"{tenant_id} {entry_id}")
    amount = 0 if is_failed else completion * 600
    entry = {
        "entry_id": entry_id, "kind": "usage", "tenant_id": tenant_id, "tenant_name": "a tenant",
        "debit_account": f"tenant/{tenant_id}", "credit_account": "revenue/usage",
        "amount_nanousd": amount, "at_ms": at_ms, "posted_at_ms": at_ms, "period": "2026-11",
        "price_version": 1, "receipt_seq": seq, "prev_sha256": digest, "sha256": digest,
        "signing_key": "none", "signature": "none",
    }  # fmt: skip
    event = {
        "event_id": entry_id, "engine_id": "engine", "journal_seq": entry_id,
        "request_id": digest[:32], "tenant_id": tenant_id, "key_id": f"key-{entry_id % 3}",
        "model": f"adapter-{adapter}" if adapter >= 0 else "base", "adapter_version": 1,
        "adapter_digest": digest, "base_revision": "base", "prompt_tokens": 400,
        "cached_tokens": 200, "completion_tokens": completion, "is_failed": is_failed,
        "finish_reason": "error" if is_failed else "stop", "stop_cause": "eos",
        "output_sha256": digest, "price_version": 1, "amount_nanousd": amount,
        "started_at_ms": at_ms - 2000, "first_token_at_ms": at_ms - 1500, "ended_at_ms": at_ms,
        "posted_at_ms": at_ms, "load_ms": 100, "load_tier": "disk", "queue_ms": 5,
    }  # fmt: skip
    return entry, event


class _Sums:
    """The roll-ups and the accounts over entries, as posting them would leave them."""

    def __init__(self) -> None:
        self._hours: dict[tuple[Any, ...], list[int]] = {}
        self._accounts: dict[str, list[int]] = {}

    def add(self, entry: dict[str, Any], event: dict[str, Any]) -> None:
        amount, tenant_id = entry["amount_nanousd"], entry["tenant_id"]
        hour_ms = entry["at_ms"] // _HOUR_MS * _HOUR_MS
        key = (tenant_id, hour_ms, event["key_id"], event["model"])
        added = (1, int(event["is_failed"]), 400, 200, event["completion_tokens"], amount)
        found = self._hours.setdefault(key, [0] * len(added))
        found[:] = [one + other for one, other in zip(found, added, strict=True)]
        account = self._accounts.setdefault(tenant_id, [0, 0])
        account[:] = [account[0] + amount, entry["receipt_seq"]]

    def rows(self) -> Iterator[tuple[sa.Table, Iterator[dict[str, Any]]]]:
        yield usage_rollups, self._rollups()
        yield tenant_accounts, (
            {"tenant_id": tenant_id, "balance_nanousd": -amount, "receipt_seq": seq,
             "receipt_sha256": "0" * 64}
            for tenant_id, (amount, seq) in self._accounts.items()
        )  # fmt: skip
        yield (
            monthly_spend,
            (
                {"tenant_id": tenant_id, "month": "2026-11", "amount_nanousd": amount}
                for tenant_id, (amount, _) in self._accounts.items()
            ),
        )

    def _rollups(self) -> Iterator[dict[str, Any]]:
        for (tenant_id, hour_ms, key_id, model), sums in self._hours.items():
            requests, failed, prompt, cached, completion, amount = sums
            yield {
                "tenant_id": tenant_id, "hour_ms": hour_ms, "kind": "usage", "key_id": key_id,
                "model": model, "adapter_digest": "", "num_entries": requests,
                "num_failed_requests": failed, "prompt_tokens": prompt, "cached_tokens": cached,
                "completion_tokens": completion, "kept_mb_s": 0, "cached_amount_nanousd": 0,
                "completion_amount_nanousd": amount, "amount_nanousd": amount,
            }  # fmt: skip


_PASSPORT = {
    "lora_format": "lora", "rank": 16, "ranks": {"16": 28}, "scales": {"1.0": 28},
    "num_modules": 28, "targets": ["q_proj", "v_proj"], "dtype": "float16",
    "num_parameters": 5 * 10**6, "max_value": 0.5, "size_bytes": 10**7,
    "invocation_tokens": None, "trained_on": None, "warnings": [],
}  # fmt: skip


class _Asker:
    """Asks for pages and times them. keys: by the name of the viewer."""

    def __init__(self, gateway: Gateway, keys: dict[str, str]) -> None:
        self._keys = keys
        self._reads_s = 0.0
        self._database = gateway.database
        read = gateway.database._read_once

        def timed(fn: Callable[[Connection], Any]) -> Any:
            began = time.perf_counter()
            try:
                return read(fn)
            finally:
                self._reads_s += time.perf_counter() - began

        gateway.database._read_once = timed  # type: ignore[method-assign]
        self._transport = httpx.ASGITransport(mount(create_app(gateway)))

    async def measure(self) -> dict[str, Any]:
        times = {
            viewer: await self._pages(key, OPERATOR_PAGES if viewer == "operator" else TENANT_PAGES)
            for viewer, key in self._keys.items()
        }
        with self._database.begin() as conn:
            rollups = conn.scalar(sa.select(sa.func.count()).select_from(usage_rollups))
        slowest = max(it["queries_ms"] for pages in times.values() for it in pages.values())
        return {"slowest_queries_ms": slowest, "rollups": rollups, **times}

    async def _pages(self, key: str, paths: tuple[str, ...]) -> dict[str, Any]:
        async with httpx.AsyncClient(
            transport=self._transport,
            base_url="http://gateway",
            headers={"origin": "http://gateway"},
        ) as client:
            signed_in = await client.post("/console/sign-in", data={"key": key})
            assert signed_in.status_code == 303, signed_in.text
            return {path: await self._page(client, path) for path in paths}

    async def _page(self, client: httpx.AsyncClient, path: str) -> dict[str, float]:
        """Medians over several answers, after a first one."""
        if "{newest}" in path:
            page = (await client.get("/console/requests")).text
            path = path.replace("{newest}", page.split("/console/requests/")[1].split('"')[0])
        queries, whole = [], []
        for _ in range(1 + _RUNS):
            self._reads_s, began = 0.0, time.perf_counter()
            answer = await client.get(path)
            assert answer.status_code == 200, (path, answer.status_code, answer.text[:2000])
            whole.append(time.perf_counter() - began)
            queries.append(self._reads_s)
        return {
            "queries_ms": rounded(1000 * median(queries[1:])),
            "whole_ms": rounded(1000 * median(whole[1:])),
        }


def _zipf(total: int, count: int) -> list[int]:
    """Divides a total so that the k-th part is a k-th of the first; each has one at least."""
    harmonic = sum(1 / rank for rank in range(1, count + 1))
    return [max(1, int(total / harmonic / rank)) for rank in range(1, count + 1)]


def _insert(conn: Connection, table: sa.Table, rows: Iterator[dict[str, Any]]) -> None:
    while block := [row for row, _ in zip(rows, range(_ROWS_AT_ONCE), strict=False)]:
        conn.execute(sa.insert(table), block)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.console", description=__doc__)
    parser.add_argument("--database", choices=DATABASES, action="append", help="just this one")
    parser.add_argument("--receipts", type=int, default=Console.receipts)
    parser.add_argument("--out", type=Path, help="file in which rows of the same name are replaced")
    options = parser.parse_args()
    lines = []
    for name in options.database or DATABASES:
        measurement = replace(Console(database=name), receipts=options.receipts)
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            result = measurement.measure(Path(folder))
        setup = asdict(measurement)
        lines.append(json_line(f"console.{name}", describe_machine(), setup, result) + "\n")
        sys.stdout.write(lines[-1])
        sys.stdout.flush()
    if options.out:
        replace_rows(options.out, lines)


if __name__ == "__main__":
    main()
