"""Reads bodies after the key is known, within limits of size and time, and checks them.

FastAPI would read and parse a body before it calls any dependency. So routes do not declare bodies
as FastAPI does, but as `body: Annotated[Model, json_body(Model)]`, after the key in the signature.
"""

import asyncio
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from server.api import errors
from server.api.deps import MaxBodyBytesDep
from server.api.json_text import check_json

# Enough for 4 MiB at 140 kB/s, the slowest rate that parts of uploads may come at.
BODY_TIMEOUT_S = 30.0
# Limit of management requests, of which a simulation's book of prices is the longest.
MAX_JSON_BYTES = 1 << 20


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The body, refused by its length if that is sent, else at the first byte over the limit."""
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said[:20]) > limit_bytes:
        raise errors.request_too_large(limit_bytes)
    received = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                received += chunk
                if len(received) > limit_bytes:
                    raise errors.request_too_large(limit_bytes)
    except ClientDisconnect:
        raise errors.invalid_request("The client left before the body was complete.") from None
    except TimeoutError:
        raise errors.body_timeout(BODY_TIMEOUT_S) from None
    return bytes(received)


async def _inference_body(request: Request, max_body_bytes: MaxBodyBytesDep) -> bytes:
    return await read_body(request, max_body_bytes)


BodyDep = Annotated[bytes, Depends(_inference_body)]


class JsonBody:
    """A dependency that reads a body of JSON as `model`."""

    def __init__(self, model: type[BaseModel]) -> None:
        self.model = model

    async def __call__(self, request: Request) -> Any:
        text = check_json(await read_body(request, MAX_JSON_BYTES))
        if "\\u0000" in text:
            # PostgreSQL stores no such text, and no field needs it.
            raise errors.invalid_request("The body must not contain the character U+0000.")
        try:
            return self.model.model_validate_json(text)
        except ValidationError as error:
            faults = error.errors(include_url=False, include_input=False, include_context=False)
            raise RequestValidationError(
                [fault | {"loc": ("body", *fault["loc"])} for fault in faults]
            ) from None


def json_body(model: type[BaseModel]) -> Any:
    """The dependency of a route's body: `body: Annotated[Model, json_body(Model)]`."""
    return Depends(JsonBody(model))
