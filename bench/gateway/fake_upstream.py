"""`python -m bench.gateway.fake_upstream PORT`: an OpenAI-compatible server without a model.

The peer, LiteLLM's proxy, stands in front of this server. It answers at once, a letter per token,
whole or streamed; tokens of a stream come PACED_STEP_S after one another.
"""

import asyncio
import json
import os
import sys
import time
from typing import Any

import uvicorn

from bench.gateway.bare import _head, _Receive, _Send, _whole

_STEP_S = float(os.environ.get("PACED_STEP_S", "0"))
_PROMPT_TOKENS = 20


async def app(scope: dict[str, Any], receive: _Receive, send: _Send) -> None:
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    if scope["path"] != "/v1/chat/completions":
        await _whole(send, b"{}")
        return
    asked = json.loads(body)
    count = asked["max_tokens"]
    if asked.get("stream"):
        await _stream(send, count)
        return
    message = {"role": "assistant", "content": "a" * count}
    usage = {"prompt_tokens": _PROMPT_TOKENS, "completion_tokens": count}
    usage["total_tokens"] = _PROMPT_TOKENS + count
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    answer = _said("chat.completion") | {"choices": [choice], "usage": usage}
    await _whole(send, json.dumps(answer).encode())


async def _stream(send: _Send, count: int) -> None:
    await send(_head(200, b"text/event-stream"))
    loop = asyncio.get_running_loop()
    start = loop.time()
    for number in range(count):
        await asyncio.sleep(start + number * _STEP_S - loop.time())
        last = "length" if number == count - 1 else None
        choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": last}
        chunk = _said("chat.completion.chunk") | {"choices": [choice]}
        event = b"data: %s\n\n" % json.dumps(chunk).encode()
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def _said(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": int(time.time()), "model": "bench"}


def main() -> None:
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
