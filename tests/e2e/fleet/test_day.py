"""A day of the deployment in small: requests without end, while things are stopped and fail.

The books are equal to what customers saw at its end. `make soak ARGS=tests/e2e/fleet/test_day.py`
takes 20 minutes, and prints what grew; `DAY_S` sets another length.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from server.billing.audit.run import audit
from tests.e2e.composed import Fleet, Machine, balanced
from tests.e2e.day import Customers, fates, percentile_ms
from tests.e2e.stack import Stack

DAY_S = float(os.environ.get("DAY_S", "1200"))
FORMATS = ("csv", "jsonl", "parquet", "focus", "cloudevents")
OUTAGE_S = 8.0
MAX_MORE_FDS = 64

pytestmark = [pytest.mark.soak, pytest.mark.timeout(DAY_S + 900)]


def test_the_books_of_a_day_are_what_customers_saw(
    fleet: Fleet, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    tenants = [fleet.machines[0].tenant(name) for name in ("morning", "evening")]
    for tenant in tenants:
        for name, folder in tiny_adapters.items():
            tenant.push(name, folder)
    models = [fleet.machines[0].model, *tiny_adapters]
    report: dict[str, object] = {"idle": idle(fleet)}
    report["first_token_ms"] = first_tokens(fleet, models, tmp_path)
    with balanced(fleet.machines, tmp_path) as url:
        groups = [Customers(url, tenant, models) for tenant in tenants]
        with groups[0], groups[1]:
            groups[0].wait_for_more()
            begun_at, before = time.monotonic(), resources(fleet)
            events = happenings(fleet, groups)
            while time.monotonic() < begun_at + DAY_S:
                name, happen = next(events)
                say(f"{time.monotonic() - begun_at:.0f} s: {name}")
                happen()
                for machine in fleet.machines:
                    machine.wait_ready()
                for customers in groups:
                    customers.wait_for_more()
        for customers in groups:
            fleet.check_books(customers)
    report["grown"] = grown(before, after := resources(fleet), time.monotonic() - begun_at)
    report["seen"] = {c.tenant.name: dict(fates(c.seen)) for c in groups}
    say(json.dumps(report, indent=1))
    exports = {name: len(exported(fleet.machines[0], name)) for name in FORMATS}
    assert all(exports.values()), exports
    with fleet.database.connect() as conn:
        engine_dirs = [path for m in fleet.machines for path in m.data_dir.glob("engine*")]
        found = audit(conn, engine_dirs=[path for path in engine_dirs if path.is_dir()])
    assert (found.findings, found.incidents) == ([], {})
    assert after["fds"] <= before["fds"] + MAX_MORE_FDS


def say(text: str) -> None:
    sys.stderr.write(f"day: {text}\n")


def happenings(
    fleet: Fleet, groups: Sequence[Customers]
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield what happens, one after the other, again and again, at each machine in its turn."""
    services = fleet.services
    while True:
        for machine in fleet.machines:
            yield f"restart of {machine.name}", lambda m=machine: restart(m)
            yield "Redis away", lambda: away(services.redis_frozen())
            yield "gateway killed", lambda m=machine: m.kill("gateway")
            yield "database away", lambda: ledger_away(fleet, groups)
            yield "engine killed", lambda m=machine: m.kill("engine")
            yield "object store away", lambda: away(services.store_away())
            yield "engine stands still", lambda m=machine: stand_still(m)
            yield f"power failure of {machine.name}", lambda m=machine: fail(m)


def restart(machine: Machine) -> None:
    machine.terminate()
    assert machine.wait_gone() == 0
    machine.start()


def fail(machine: Machine) -> None:
    machine.die()
    machine.start()


def away(outage: AbstractContextManager[None]) -> None:
    with outage:
        time.sleep(OUTAGE_S)


def ledger_away(fleet: Fleet, groups: Sequence[Customers]) -> None:
    for customers in groups:
        customers.is_ledger_away = True
    away(fleet.services.database_away())
    for machine in fleet.machines:
        machine.wait_ready()
    for customers in groups:
        customers.wait_for_more()
        customers.is_ledger_away = False


def stand_still(machine: Machine) -> None:
    """Suspend an engine until the watchdog has killed it and it runs again."""
    pid = machine.pid("engine")
    os.kill(pid, signal.SIGSTOP)
    Stack.wait(lambda: machine.pid("engine") != pid)


# ---- what is reported ----


def first_tokens(fleet: Fleet, models: list[str], folder: Path) -> dict[str, list[float]]:
    """Return median and 99th percentile of times to first tokens, direct and balanced."""
    tenant = fleet.machines[0].tenant("first-tokens")
    found = {}
    with balanced(fleet.machines, folder) as url:
        for name, address in (("direct", fleet.machines[0].base_url), ("balanced", url)):
            with Customers(address, tenant, models[:1], 1, ["stream"]) as customers:
                customers.wait_for_more(100)
            found[name] = [percentile_ms(customers.seen, share) for share in (0.5, 0.99)]
    return found


def idle(fleet: Fleet, seconds: float = 30.0) -> list[dict[str, float]]:
    """Return each machine's use of a core in percent, and its switches a second, at rest."""
    before = [usage(machine) for machine in fleet.machines]
    time.sleep(seconds)
    after = [usage(machine) for machine in fleet.machines]
    return [
        {name: round((b[name] - a[name]) / seconds, 2) for name in a}
        for a, b in zip(before, after, strict=True)
    ]


def usage(machine: Machine) -> dict[str, float]:
    ticks, switches = 0, 0
    for pid in machine.pids():
        ticks += sum(int(n) for n in _stat(pid)[11:13])
        for task in Path(f"/proc/{pid}/task").iterdir():
            lines = (task / "status").read_text().splitlines()
            switches += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return {"core_percent": 100 * ticks / os.sysconf("SC_CLK_TCK"), "switches": switches}


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def resources(fleet: Fleet) -> dict[str, float]:
    """Return what may grow: open files, resident MB, journals, and the database."""
    pids = [pid for machine in fleet.machines for pid in machine.pids()]
    rss = sum(int(_stat(pid)[21]) * os.sysconf("SC_PAGESIZE") for pid in pids)
    folders = [machine.data_dir for machine in fleet.machines]
    data = sum(f.stat().st_size for d in folders for f in d.rglob("*.journal"))
    with fleet.database.connect() as conn:
        size = conn.scalar(sa.text("SELECT pg_database_size(current_database())"))
        count = conn.scalar(sa.text("SELECT count(*) FROM usage_events"))
    return {
        "fds": sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids),
        "resident_mb": rss / 1e6,
        "journal_mb": data / 1e6,
        "database_mb": size / 1e6,
        "requests": count,
    }


def grown(before: dict[str, float], after: dict[str, float], seconds: float) -> dict[str, float]:
    """Return the growth an hour."""
    return {name: round((after[name] - before[name]) * 3600 / seconds, 1) for name in before}


def exported(machine: Machine, format: str) -> bytes:
    answer: httpx.Response = machine.operator.get(f"/admin/v1/usage/export?format={format}")
    assert answer.status_code == 200, answer.text
    return answer.content
