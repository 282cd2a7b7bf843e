"""`python -m tests.crash.sweep FOLDER`: carries out plans, some at a time, each in a fork.

It reads lines of JSON, {"plans": [...], "urls": [...]}, and answers each with a line of results.
Each url, None for SQLite, serves one run at a time. Forks import nothing, and inherit no
connection.
"""

import gc
import os
import shutil
import sys
import traceback
from collections import deque
from pathlib import Path

import anyio._backends._asyncio  # noqa: F401  imported once, for all forks
import msgspec
import psycopg  # noqa: F401
import uvicorn.lifespan.on
import uvicorn.protocols.http.httptools_impl  # noqa: F401
import uvloop  # noqa: F401

from tests.crash.plans import Plan
from tests.crash.run import Result, furnish, run


class Order(msgspec.Struct):
    plans: list[Plan]
    urls: list[str | None]


def main() -> None:
    folder = Path(sys.argv[1])
    furnished = folder / "furnished"
    furnish(furnished)
    gc.freeze()  # the collector would write to these objects, and forks would copy their pages
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        results = carry_out(order, furnished, folder)
        sys.stdout.write(msgspec.json.encode(results).decode() + "\n")
        sys.stdout.flush()


def carry_out(order: Order, furnished: Path, folder: Path) -> list[Result]:
    """Carry out plans; return their results in the order in which the runs ended."""
    waiting, free, running = deque(order.plans), list(order.urls), {}
    results = []
    while waiting or running:
        while waiting and free:
            plan, url = waiting.popleft(), free.pop()
            place = folder / f"run-{plan.seed}"
            pid = _fork(plan, furnished, place, url)
            running[pid] = plan, url, place
        pid, _ = os.wait()
        plan, url, place = running.pop(pid)
        free.append(url)
        result = msgspec.json.decode((place / "result.json").read_bytes(), type=Result)
        results.append(result)
        shutil.rmtree(place, ignore_errors=True)
    return results


def _fork(plan: Plan, furnished: Path, place: Path, url: str | None) -> int:
    if pid := os.fork():
        return pid
    try:
        result = run(plan, furnished, place, url)
    except BaseException:
        result = Result(plan.seed, wrong=[traceback.format_exc()])
    (place / "result.json").write_bytes(msgspec.json.encode(result))
    os._exit(0)


if __name__ == "__main__":
    main()
