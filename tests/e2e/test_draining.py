"""SIGTERM: running answers come to their end, or are ended in an orderly way; none is cut off."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.stack import Stack, running

LONG = {
    "model": "base", "prompt": [5, 6, 7], "ignore_eos": True, "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip


def read(lines: Any) -> list[dict[str, Any]]:
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]", "the end of an answer is there"
    return [json.loads(event) for event in events]


def test_what_runs_ends_and_nobody_new_is_admitted(tmp_path: Path, tiny_model: Path) -> None:
    slow = {"drain_timeout_s": 2.5, "environment": {"FAKE_STEP_S": "0.02"}, "max_model_len": 512}
    with running(tmp_path / "stack", tiny_model, fake_engine=True, **slow) as stack:
        tenant = stack.tenant("acme")
        answers: dict[int, list[dict[str, Any]]] = {}

        def stream(tokens: int, begun: threading.Event) -> None:
            headers = {"authorization": f"Bearer {tenant.api_key}"}
            url, body = f"{stack.base_url}/v1/completions", LONG | {"max_tokens": tokens}
            with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
                lines = answer.iter_lines()
                first = next(lines)
                begun.set()
                answers[tokens] = read([first, *lines])

        threads = []
        for tokens in (40, 480):
            begun = threading.Event()
            threads.append(threading.Thread(target=stream, args=(tokens, begun)))
            threads[-1].start()
            assert begun.wait(30)
        os.kill(stack.pid("gateway"), signal.SIGTERM)
        stack.wait(lambda: is_refused(stack))
        assert not answers, "the others are under way meanwhile"
        for thread in threads:
            thread.join(30)
        short, long = (answers[tokens][-1]["usage"] for tokens in (40, 480))
        assert (short["completion_tokens"], short["x_chorale"]["stop_cause"]) == (40, "max_tokens")
        assert long["x_chorale"]["stop_cause"] == "aborted", "ordered to end in time"
        assert 40 < long["completion_tokens"] < 480
        check_billed(stack, [short, long])


def is_refused(stack: Stack) -> bool:
    try:
        return httpx.get(f"{stack.base_url}/ready").status_code == 503
    except httpx.TransportError:
        return True


def check_billed(stack: Stack, usages: list[dict[str, Any]]) -> None:
    """Check that the gateway, which the supervisor has started again, bills these usages."""
    stack.wait_ready()
    billed = sorted(event["completion_tokens"] for event in stack.settled_events(len(usages)))
    assert billed == sorted(usage["completion_tokens"] for usage in usages)
