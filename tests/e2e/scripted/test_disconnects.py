"""Clients that leave at every point of an answer pay for computed tokens and leave nothing behind.

All but the model is real. A client is a bare socket, so that it can end in every way that a
connection can.
"""

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

import pytest

from engine.journal.lines import read_records
from engine.wire.records import EndRecord, StartRecord
from tests.e2e.bill import hold_states
from tests.e2e.stack import Stack, Tenant

NUM_TOKENS = 6
SHORT = {"max_tokens": NUM_TOKENS, "stream": True, "stream_options": {"include_usage": True}}
LONG = SHORT | {"max_tokens": 400}
BODY = {"model": "base", "prompt": [5, 6, 7], "ignore_eos": True}


@pytest.fixture(scope="module")
def tenant(scripted: Stack) -> Tenant:
    """A tenant with one seat, which a request must have given back before the next one can run."""
    return scripted.tenant("one-seat", max_concurrency=1)


def connect(stack: Stack) -> socket.socket:
    client = socket.socket()
    client.settimeout(30)
    client.connect(("127.0.0.1", stack.port))
    return client


def encode(body: dict[str, Any]) -> bytes:
    return json.dumps(BODY | body).encode()


def send(client: socket.socket, tenant: Tenant, body: dict[str, Any]) -> None:
    data = encode(body)
    lines = [
        "POST /v1/completions HTTP/1.1", "Host: gateway", "Content-Type: application/json",
        f"Authorization: Bearer {tenant.api_key}", f"Content-Length: {len(data)}", "", "",
    ]  # fmt: skip
    client.sendall("\r\n".join(lines).encode() + data)


def read_events(client: socket.socket, count: int) -> bytes:
    """Read until `count` events have come, [DONE] included; return all bytes."""
    received = b""
    while received.count(b"data: ") < count or not received.endswith(b"\n"):
        piece = client.recv(1 << 16)
        assert piece, received
        received += piece
    return received


def reset(client: socket.socket) -> None:
    """Close a connection with RST."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def leave_after(tenant: Tenant, num_events: int, body: dict[str, Any], *, rudely: bool) -> None:
    client = connect(tenant.stack)
    send(client, tenant, body)
    if num_events:
        assert b" 200 " in read_events(client, num_events)[:20]
    reset(client) if rudely else client.close()


def is_free(tenant: Tenant) -> bool:
    """Whether the tenant's only seat is free: another request is served."""
    body = BODY | {"max_tokens": 1}
    return tenant.http.post("/v1/completions", json=body).status_code == 200


def is_empty(stack: Stack) -> bool:
    """Whether no request runs or waits in the engine, and every slab is free or a cache's."""
    (engine,) = stack.operator.get("/admin/v1/engines").json()["data"]
    if (now := engine["figures"]) is None:  # the engine has only just started
        return False
    kept = now["adapter_slabs"] + now["prefix_slabs"]
    return (
        now["running"] == now["waiting"] == now["unsettled_records"] == 0
        and now["free_slabs"] + kept == now["total_slabs"]
    )


def billed(tenant: Tenant) -> dict[str, dict[str, Any]]:
    """Return the tenant's usage events by request id."""
    text = tenant.http.get("/v1/usage/export?format=jsonl").text
    entries = [json.loads(line) for line in text.splitlines()]
    return {entry["request_id"]: entry for entry in entries if entry["kind"] == "usage"}


def journaled(tenant: Tenant) -> dict[str, EndRecord]:
    """Return the ends of the tenant's requests by request id."""
    records = list(read_records(tenant.stack.data_dir / "engine" / "journal"))
    starts = [record for record in records if isinstance(record, StartRecord)]
    own = {start.request_id for start in starts if start.tenant_id == tenant.tenant_id}
    ends = [record for record in records if isinstance(record, EndRecord)]
    return {end.request_id: end for end in ends if end.request_id in own}


def held(tenant: Tenant) -> dict[str, int]:
    return hold_states(tenant.stack, tenant.tenant_id)


def check_nothing_is_left(tenant: Tenant) -> dict[str, dict[str, Any]]:
    """Check that no hold is open and that usage events agree with the journal, token for token.

    Returns the usage events by request id.
    """
    tenant.stack.wait(lambda: held(tenant).keys() <= {"posted"})
    tenant.stack.wait(lambda: is_empty(tenant.stack))
    events, ended = billed(tenant), journaled(tenant)
    assert events.keys() == ended.keys()
    for request_id, record in ended.items():
        for name in ("prompt", "cached", "completion"):
            assert events[request_id][f"{name}_tokens"] == getattr(record, f"num_{name}_tokens")
    assert held(tenant).get("posted", 0) == len(events)
    return events


EARLY, LATE = (0, 1, 5), (NUM_TOKENS, NUM_TOKENS + 1, NUM_TOKENS + 2)
"""Numbers of events after which a client leaves; late: last token, usage chunk, [DONE]."""


def sweep(tenant: Tenant, early: Sequence[int], late: Sequence[int]) -> list[dict[str, Any]]:
    """Let a client leave at each place, closing normally and with RST; return the usage events."""
    before = check_nothing_is_left(tenant)
    for rudely in (False, True):
        for body, places in ((LONG, early), (SHORT, late)):
            for place in places:
                leave_after(tenant, place, body, rudely=rudely)
                tenant.stack.wait(lambda: is_free(tenant))
    events = check_nothing_is_left(tenant)
    new = [event for request_id, event in events.items() if request_id not in before]
    return [
        event
        for event in new
        if not (event["completion_tokens"] == 1 and event["stop_cause"] == "max_tokens")
    ]


def test_a_client_that_leaves_anywhere_pays_for_what_ran_and_leaves_nothing_behind(
    tenant: Tenant,
) -> None:
    events = sweep(tenant, EARLY, LATE)
    aborted = [event for event in events if event["stop_cause"] == "aborted"]
    # The request of a client that left at once may never have been sent to the engine.
    assert len(aborted) >= 2 * (len(EARLY) - 1)
    assert all(event["completion_tokens"] < LONG["max_tokens"] for event in aborted)
    whole = [event["completion_tokens"] for event in events if event not in aborted]
    assert whole == [NUM_TOKENS] * 2 * len(LATE)


@pytest.mark.soak
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"logprobs": 5}], ids=str)
def test_a_client_that_leaves_after_any_event_leaves_nothing_behind(
    tenant: Tenant, more: dict[str, Any], monkeypatch
) -> None:
    monkeypatch.setitem(BODY, "n", 1)
    for name, value in more.items():
        monkeypatch.setitem(BODY, name, value)
    aborted = [e for e in sweep(tenant, range(40), LATE) if e["stop_cause"] == "aborted"]
    assert len(aborted) >= 2 * 39


def test_a_whole_answer_whose_client_left_is_aborted(tenant: Tenant) -> None:
    before = check_nothing_is_left(tenant)
    client = connect(tenant.stack)
    send(client, tenant, LONG | {"stream": False, "stream_options": None})
    tenant.stack.wait(lambda: "open" in held(tenant))
    client.close()
    tenant.stack.wait(lambda: is_free(tenant))
    events = check_nothing_is_left(tenant)
    new = [event for request_id, event in events.items() if request_id not in before]
    (aborted,) = [event for event in new if event["stop_cause"] == "aborted"]
    assert aborted["completion_tokens"] < LONG["max_tokens"]
