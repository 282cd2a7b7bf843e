"""`python -m bench.gateway.fake_upstream PORT`: an OpenAI-compatible server without a model.

The peer, LiteLLM's proxy, stands in front of this server. It answers at once, a letter per token,
whole or streamed; tokens of a stream come PACED_STEP_S after one another.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

_STEP_S = float(os.environ.get("PACED_STEP_S", "0"))
_PROMPT_TOKENS = 20


async def ready(request: Request) -> Response:
    return JSONResponse({})


async def complete(request: Request) -> Response:
    asked = await request.json()
    count = asked["max_tokens"]
    if asked.get("stream"):
        return StreamingResponse(_events(count), media_type="text/event-stream")
    message = {"role": "assistant", "content": "a" * count}
    usage = {"prompt_tokens": _PROMPT_TOKENS, "completion_tokens": count}
    usage["total_tokens"] = _PROMPT_TOKENS + count
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    return JSONResponse(_said("chat.completion", choice) | {"usage": usage})


async def _events(count: int) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    start = loop.time()
    for number in range(count):
        await asyncio.sleep(start + number * _STEP_S - loop.time())
        last = "length" if number == count - 1 else None
        choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": last}
        yield b"data: %s\n\n" % json.dumps(_said("chat.completion.chunk", choice)).encode()
    yield b"data: [DONE]\n\n"


def _said(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    created = int(time.time())
    return {
        "id": "chatcmpl-1", "object": kind, "created": created, "model": "bench",
        "choices": [choice],
    }  # fmt: skip


if __name__ == "__main__":
    routes = [Route("/ready", ready), Route("/v1/chat/completions", complete, methods=["POST"])]
    uvicorn.run(Starlette(routes=routes), port=int(sys.argv[1]), log_level="warning")
