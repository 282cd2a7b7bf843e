"""A day in small: customers who ask again and again, what they saw, and what they are billed."""

import json
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import sqlalchemy as sa

from server.billing.tables import entries, usage_events
from tests.e2e.stack import Stack, Tenant

Fate = Literal["whole", "left", "broken", "refused"]
Kind = Literal["stream", "whole", "leaves", "repeats"]

KINDS: tuple[Kind, ...] = ("stream", "stream", "whole", "leaves", "repeats")
_LEAVES_AFTER = 5
_MAX_TRIES = 3000
"""Tries of one request: the claim of a gateway that died before it took the hold runs out after
three minutes.
"""
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as its customer saw it.

    whole: all of the answer, which said its cost.   left: the customer hung up.   broken: an error
    event, or a connection that ended early.   refused: an error status (None: no connection).
    first_s: seconds to the first token of a stream.
    """

    fate: Fate
    status: int | None = None
    code: str | None = None
    request_id: str | None = None
    cost_nanousd: int = 0
    first_s: float | None = None


@dataclass
class Customers:
    """Customers of one tenant at one address, who ask until the `with` block ends.

    is_ledger_away: set while answers may leave before they are stored for repeats.
    faults: sentences about answers that break a promise.
    """

    url: str
    tenant: Tenant
    models: Sequence[str]
    num_customers: int = 4
    kinds: Sequence[Kind] = KINDS
    is_ledger_away: bool = False
    seen: list[Seen] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _customers: list[Future[None]] = field(default_factory=list)

    def __enter__(self) -> "Customers":
        self._pool = ThreadPoolExecutor(self.num_customers)
        self._customers = [self._pool.submit(self._run, n) for n in range(self.num_customers)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._pool.shutdown()
        for customer in self._customers:
            customer.result()

    def count(self, fate: Fate) -> int:
        return sum(seen.fate == fate for seen in list(self.seen))

    def wait_for_more(self, number: int = 8) -> None:
        """Wait until so many more answers are whole."""
        before = self.count("whole")
        Stack.wait(lambda: self.count("whole") >= before + number)

    def _run(self, number: int) -> None:
        chance = random.Random(number)
        with httpx.Client(base_url=self.url, headers=self.tenant.headers, timeout=60) as http:
            while not self._stopping.is_set():
                body = {
                    "model": chance.choice(self.models),
                    "prompt": [chance.randrange(5, 60) for _ in range(chance.randrange(1, 40))],
                    "max_tokens": chance.choice([5, 40, 100]),
                    "ignore_eos": True,
                }
                seen = self._ask(http, body, chance.choice(self.kinds))
                self.seen.append(seen)
                if seen.fate == "refused":
                    time.sleep(_PAUSE_S)

    def _ask(self, http: httpx.Client, body: dict[str, Any], kind: Kind) -> Seen:
        match kind:
            case "whole":
                return _seen_whole(_post(http, body))
            case "repeats":
                return self._repeat(http, body)
        return _stream(http, body, _LEAVES_AFTER if kind == "leaves" else None)

    def _repeat(self, http: httpx.Client, body: dict[str, Any]) -> Seen:
        """Ask with an Idempotency-Key until there is an answer, and at once for the same again.

        A repeat may be told to wait only for an answer that came while the ledger was away.
        """
        key, num_tries = uuid.uuid4().hex, 0
        while (answer := _post(http, body, key)) is None or answer.status_code != 200:
            num_tries += 1
            if num_tries > _MAX_TRIES:
                return _seen_whole(answer)
            time.sleep(_PAUSE_S)
        may_wait, again = self.is_ledger_away, _post(http, body, key)
        while may_wait and again is not None and again.status_code == 409:
            time.sleep(_PAUSE_S)
            again = _post(http, body, key)
        if again is not None and again.status_code < 500 and again.content != answer.content:
            self.faults.append(f"at {time.ctime()} a repeat got {again.status_code} {again.text}")
        return _seen_whole(answer)


def _post(
    http: httpx.Client, body: dict[str, Any], key: str | None = None
) -> httpx.Response | None:
    headers = {"Idempotency-Key": key} if key else {}
    try:
        return http.post("/v1/completions", json=body, headers=headers)
    except httpx.TransportError:
        return None


def _seen_whole(answer: httpx.Response | None) -> Seen:
    if answer is None:
        return Seen("refused")
    if answer.status_code != 200:
        return Seen("refused", answer.status_code, answer.json()["error"]["code"])
    cost = answer.json()["usage"]["x_chorale"]["cost_nanousd"]
    return Seen("whole", 200, request_id=_id_of(answer.json()), cost_nanousd=cost)


def _stream(http: httpx.Client, body: dict[str, Any], leaves_after: int | None) -> Seen:
    """Read a stream to its end, or leave it after so many events."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    begun_at, first_s, request_id, num_events = time.monotonic(), None, None, 0
    event: dict[str, Any] = {}
    try:
        with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                answer.read()
                return _seen_whole(answer)
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    cost = event["usage"]["x_chorale"]["cost_nanousd"]
                    return Seen("whole", 200, None, request_id, cost, first_s)
                if line:
                    event = json.loads(line.removeprefix("data: "))
                    request_id = _id_of(event) if "id" in event else request_id
                    first_s = first_s or time.monotonic() - begun_at
                    num_events += 1
                if leaves_after == num_events:
                    return Seen("left", 200, None, request_id)
    except httpx.TransportError:
        return Seen("broken" if request_id else "refused", None, None, request_id)
    return Seen("broken", 200, event.get("error", {}).get("code"), request_id)


def _id_of(answer: dict[str, Any]) -> str:
    return str(answer["id"]).rpartition("-")[2]


# ---- the books ----


def paid(database: sa.Engine, tenant_id: str) -> dict[str, int]:
    """Return what each request of a tenant costs, corrections taken off, in nano-dollars."""
    back = entries.alias()
    query = (
        sa.select(
            usage_events.c.request_id,
            entries.c.amount_nanousd - sa.func.coalesce(back.c.amount_nanousd, 0),
        )
        .join(entries, entries.c.entry_id == usage_events.c.event_id)
        .outerjoin(back, back.c.reverses_entry_id == entries.c.entry_id)
        .where(usage_events.c.tenant_id == tenant_id)
    )
    with database.connect() as conn:
        return {row[0]: int(row[1]) for row in conn.execute(query)}


def wrong(seen: Sequence[Seen], paid: dict[str, int]) -> list[str]:
    """Return a sentence for each request whose bill is not what its customer saw.

    Who hung up pays for some tokens. All that costs anything is an answer that somebody got.
    """
    unseen = dict(paid)
    found = []
    for one in seen:
        cost = unseen.pop(one.request_id, None) if one.request_id else None
        if one.fate == "whole" and cost != one.cost_nanousd:
            found.append(f"billed {cost}: {one}")
        if one.fate in ("broken", "refused") and cost:
            found.append(f"billed {cost}: {one}")
    return found + [f"nobody got {name}, for {cost}" for name, cost in unseen.items() if cost]


def fates(seen: Sequence[Seen]) -> Counter[str]:
    """Count what customers saw, for a report."""
    return Counter(f"{one.fate} {one.status} {one.code or ''}".strip() for one in seen)


def percentile_ms(seen: Sequence[Seen], share: float) -> float:
    """Return a percentile of the times to first tokens of streams."""
    times = sorted(one.first_s for one in seen if one.first_s is not None)
    return round(times[int(share * (len(times) - 1))] * 1000, 1)
