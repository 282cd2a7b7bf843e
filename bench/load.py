"""An open-loop client: every request leaves when it is due, however many are still under way."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import httpx

from bench.outcome import Outcome
from bench.workload import BenchRequest

_DONE = "[DONE]"


class RequestFailed(Exception):
    """The server's answer is an error; str() is its code."""


def _completion(request: BenchRequest) -> dict[str, Any]:
    return {
        "model": request.model,
        "prompt": request.prompt_token_ids,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }


async def run_load(
    url: str,
    keys: Mapping[str, str],
    requests: Sequence[BenchRequest],
    timeout_s: float,
    make_body: Callable[[BenchRequest], dict[str, Any]] = _completion,
    path: str = "/v1/completions",
) -> list[Outcome]:
    """Send all requests, each when it is due; return their outcomes in the order of the requests.

    keys: model -> API key.   timeout_s: longest time between two pieces of one answer.
    make_body: makes what is posted to `path`; by default, the server must know `ignore_eos` and
    `return_token_ids`, as Chorale and vLLM do.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(timeout_s, pool=None)
    # trust_env=False: requests must not go through a proxy that the environment names.
    async with httpx.AsyncClient(
        base_url=url, limits=limits, timeout=timeout, trust_env=False
    ) as client:
        start = time.perf_counter()
        return await asyncio.gather(
            *(
                _send(
                    request, _chunks(client, path, keys[request.model], make_body(request)), start
                )
                for request in requests
            )
        )


async def _send(
    request: BenchRequest, chunks: AsyncIterator[dict[str, Any]], start: float
) -> Outcome:
    await asyncio.sleep(start + request.due_s - time.perf_counter())
    chunk_s: list[float] = []
    token_ids: list[int] = []
    error: str | None = None
    sent_s = time.perf_counter() - start
    try:
        async for chunk in chunks:
            if new_token_ids := _token_ids(chunk):
                chunk_s.append(time.perf_counter() - start)
                token_ids += new_token_ids
    except RequestFailed as failed:
        error = str(failed)
    except httpx.HTTPError as failed:
        error = type(failed).__name__
    end_s = time.perf_counter() - start
    return request.outcome(token_ids, chunk_s, sent_s=sent_s, end_s=end_s, error=error)


async def _chunks(
    client: httpx.AsyncClient, path: str, key: str, body: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of one streamed answer. Raises RequestFailed, httpx.HTTPError."""
    headers = {"authorization": f"Bearer {key}"}
    async with client.stream("POST", path, json=body, headers=headers) as answer:
        if answer.status_code != 200:
            raise RequestFailed(_error_code(answer.status_code, await answer.aread()))
        async for line in answer.aiter_lines():
            data = line.removeprefix("data:").strip()
            if data == _DONE:
                return
            if line.startswith("data:"):
                chunk = json.loads(data)
                if "error" in chunk:
                    raise RequestFailed(_code_of(chunk["error"]))
                yield chunk
                if chunk.get("stop"):  # llama.cpp's last event
                    return
    raise RequestFailed("stream_ended_early")


def _token_ids(chunk: dict[str, Any]) -> list[int]:
    """Return the tokens of an event, in the form of OpenAI's API or of llama.cpp's own."""
    choices = chunk.get("choices", ())
    named = [choice.get("token_ids") for choice in choices] or [chunk.get("tokens")]
    return [token for token_ids in named for token in token_ids or ()]


def _error_code(status: int, body: bytes) -> str:
    try:
        return f"{status} {_code_of(json.loads(body)['error'])}"
    except (ValueError, KeyError, TypeError):
        return str(status)


def _code_of(error: dict[str, Any]) -> str:
    return str(error.get("code") or error.get("type") or "unknown")
