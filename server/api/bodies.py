"""Reads bodies after the key is known, within limits of size, rate and memory, and checks them.

FastAPI would read and parse a body before it calls any dependency. So routes do not declare bodies
as FastAPI does, but as `body: Annotated[Model, json_body(Model)]`, after the key in the signature.
"""

from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect

from registry.errors import Invalid
from server.api import errors
from server.api.deps import BodiesDep, gateway_of
from server.api.field_docs import describe_fields
from server.api.json_text import check_json
from server.limits.inflow import Inflow

# Limit of management requests, of which a simulation's book of prices is the longest.
MAX_JSON_BYTES = 1 << 20


class BodyFields(BaseModel):
    """The base of a management request's body, or of a part of one; other fields are refused."""

    model_config = ConfigDict(extra="forbid", defer_build=True, json_schema_extra=describe_fields)


async def read_body(request: Request, bodies: Inflow, limit_bytes: int) -> bytes:
    """The body, refused by its length if that is sent, else at the first byte over the limit.

    bodies: all that are being read; they hold their bytes.
    """
    refuse_compressed(request)
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said[:20]) > limit_bytes:
        raise errors.request_too_large(limit_bytes)
    received, pieces = bytearray(), request.stream()
    try:
        with bodies.arrival(request.state.tenant_id) as body:
            while piece := await body.next(pieces):
                if len(received) + len(piece) > limit_bytes:
                    raise errors.request_too_large(limit_bytes)
                body.hold(len(piece))
                received += piece
    except ClientDisconnect:
        raise Invalid("The client left before the body was complete.") from None
    except TimeoutError:
        raise errors.body_timeout() from None
    return bytes(received)


def refuse_compressed(request: Request) -> None:
    """Raises Invalid if the body's header says that it is compressed."""
    if request.headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        raise errors.compressed_body()


async def _inference_body(request: Request) -> bytes:
    gateway = gateway_of(request)
    return await read_body(request, gateway.bodies, gateway.settings.max_body_bytes)


BodyDep = Annotated[bytes, Depends(_inference_body)]


class JsonBody:
    """A dependency that reads a body of JSON as `model`."""

    def __init__(self, model: type[BaseModel]) -> None:
        self.model = model

    async def __call__(self, request: Request, bodies: BodiesDep) -> Any:
        text = check_json(await read_body(request, bodies, MAX_JSON_BYTES))
        if "\\u0000" in text:
            # PostgreSQL stores no such text, and no field needs it.
            raise Invalid("The body must not contain the character U+0000.")
        try:
            return self.model.model_validate_json(text)
        except ValidationError as error:
            faults = error.errors(include_url=False, include_input=False)
            raise RequestValidationError(
                [fault | {"loc": ("body", *fault["loc"])} for fault in faults]
            ) from None


def json_body(model: type[BaseModel]) -> Any:
    """The dependency of a route's body: `body: Annotated[Model, json_body(Model)]`."""
    return Depends(JsonBody(model))
