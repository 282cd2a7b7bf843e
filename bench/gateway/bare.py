"""`python -m bench.gateway.bare ENGINE.sock PORT`: HTTP in front of the engine and nothing else.

There is no key, limit, tokenizer, hold, ledger or check of the request. It runs the same HTTP
server as the gateway, the same client of the engine, and sends one SSE event per token. The time
that the gateway takes beyond this is the cost of its features.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn

from bench.gateway.plain_client import PlainClient
from engine.pulled import pulled

_Send = Callable[[dict[str, Any]], Awaitable[None]]
_Receive = Callable[[], Awaitable[dict[str, Any]]]


class BareApp:
    def __init__(self, client: PlainClient) -> None:
        self._client = client

    async def __call__(self, scope: dict[str, Any], receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if scope["path"] == "/ready":
            await _whole(send, b"{}")
            return
        asked = json.loads(body)
        sizes = (asked["prompt_tokens"], asked["max_tokens"])
        tokens = pulled(lambda take: self._client.generate(*sizes, take))
        if asked["stream"]:
            await send(_head(200, b"text/event-stream"))
            async for output in tokens:
                text = bytes(output.new_token_ids).decode()
                chunk = {"id": output.request_id, "choices": [{"index": 0, "text": text}]}
                event = b"data: %s\n\n" % json.dumps(chunk).encode()
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        else:
            text = "".join([bytes(output.new_token_ids).decode() async for output in tokens])
            answer = {"choices": [{"index": 0, "text": text}]}
            await _whole(send, json.dumps(answer).encode())


def _head(status: int, content_type: bytes, length: int | None = None) -> dict[str, Any]:
    headers = [(b"content-type", content_type)]
    if length is not None:
        headers.append((b"content-length", b"%d" % length))
    return {"type": "http.response.start", "status": status, "headers": headers}


async def _whole(send: _Send, body: bytes) -> None:
    await send(_head(200, b"application/json", len(body)))
    await send({"type": "http.response.body", "body": body})


async def _serve(socket_path: Path, port: int) -> None:
    client = PlainClient(socket_path)
    await client.start()
    config = uvicorn.Config(
        BareApp(client), port=port, log_level="warning", access_log=False, server_header=False
    )
    await uvicorn.Server(config).serve()
    await client.close()


def main() -> None:
    loop = uvicorn.Config(None, loop="auto").get_loop_factory()  # type: ignore[arg-type]
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(_serve(Path(sys.argv[1]), int(sys.argv[2])))


if __name__ == "__main__":
    main()
