"""The ASGI application: routers, errors, and the start and end of the gateway's parts."""

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from registry.errors import Fault, StorageError
from registry.uploads.sweep import purge, sweep_objects, sweep_uploads
from server.adapters.watch import TICK_S, AdapterWatch
from server.api.endpoints import (
    adapters,
    admin,
    audit,
    audit_log,
    base_limits,
    base_models,
    billing,
    budgets,
    engines,
    exports,
    inference,
    keys,
    limits,
    machines,
    model_routes,
    models,
    offers,
    organization,
    prices,
    problems,
    receipts,
    sharing,
    simulate,
    statements,
    tokens,
    uploads,
    usage,
    webhooks,
)
from server.api.errors import INVALID, KNOWN, ErrorAnswer
from server.api.gateway import Gateway
from server.api.middleware import Edge, WriteLine, error_response
from server.api.openapi import openapi_document
from server.api.unknown_urls import unknown_url
from server.billing.prices import ensure_price
from server.billing.receipts.signing_keys import record_key
from server.database.clock import now_ms
from server.database.database import DatabaseError
from server.inference import base_follower, cancels, limit_refusals
from server.inference.bases import Bases
from server.version import VERSION

logger = logging.getLogger(__name__)

_READY_S = 5.0
"""Longest time for which a gateway with neighbours waits for an engine before it listens."""
_LOOK_S = 0.05
_SWEEP_S = 60.0
_SWEEPS_PER_PURGE = 60
# `receipts.router` would take the path of `receipts.public_router` for a request's id.
_ROUTERS = (
    receipts.public_router,
    *(module.router for module in (
        inference, limits, models, adapters, sharing, offers, uploads, usage, receipts, statements,
        admin, base_limits, base_models, engines, prices, audit, problems,
    )),
    *(router for pair in (
        keys.both, audit_log, budgets.both, webhooks.both, model_routes.both, billing.both, exports,
    ) for router in (pair.router, pair.admin_router)),
    statements.admin_router, simulate.router, organization.router, tokens.router, machines.router,
)  # fmt: skip
_METHODS = ["GET", "PUT", "POST", "PATCH", "DELETE"]


def create_app(gateway: Gateway, write_line: WriteLine = lambda _: None) -> FastAPI:
    """The application around a gateway; starting it connects to the engine and the database.

    write_line: takes the log line of every request, as LogWriter.write does.
    """
    app = FastAPI(
        title="Chorale",
        version=VERSION,
        lifespan=_lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        # A redirect would lead wherever the Host header says.
        redirect_slashes=False,
        # FastAPI's own spans and logs, which hold messages of exceptions, and so what clients sent.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.gateway = gateway
    for router in _ROUTERS:
        # `include_router` would build each route a second time, in every application anew.
        app.router.routes += router.routes
    _handle_errors(app)
    app.openapi = functools.cache(lambda: openapi_document(app))  # type: ignore[method-assign]
    if origins := gateway.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=_METHODS, allow_headers=["*"],
            expose_headers=["*"],
        )  # fmt: skip
    app.add_middleware(
        Edge, metrics=gateway.metrics, write_line=write_line, tracer=gateway.tracer, origins=origins
    )
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start the gateway's parts, and end them in the opposite order, even if one of them fails."""
    gateway: Gateway = app.state.gateway
    database, follower = gateway.database, gateway.follower
    async with AsyncExitStack() as ends:
        ends.callback(database.close)
        if gateway.tracer:
            ends.push_async_callback(asyncio.to_thread, gateway.tracer.close)
        await database.write(lambda conn: ensure_price(conn, now_ms()))
        await database.write(lambda conn: record_key(conn, gateway.signer.public, now_ms()))
        ends.push_async_callback(gateway.limiter.close)
        await gateway.limiter.start()
        ends.push_async_callback(follower.close)
        await follower.start()
        await ends.enter_async_context(_working(gateway))
        if gateway.neighbours:
            # Meanwhile the neighbours take the connections, and serve them.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(_ready(gateway.bases), _READY_S)
            ends.push_async_callback(gateway.neighbours.close)
            await gateway.neighbours.start()
        yield


async def _ready(bases: Bases) -> None:
    while not bases.is_ready:
        await asyncio.sleep(_LOOK_S)


@asynccontextmanager
async def _working(gateway: Gateway) -> AsyncIterator[None]:
    """Run the gateway's background work; at the end, let requests finish and be paid."""
    settling = _begin(gateway.settler.run())
    tasks = [_begin(work) for work in _background(gateway)]
    try:
        yield
    finally:
        await gateway.drain.finish()
        for task in tasks:
            task.cancel()
        await gateway.recorder.close()
        for base in gateway.bases:
            await base.token_leases.close()
        await gateway.key_uses.write()
        await gateway.settler.drain(gateway.settings.drain_timeout_s)
        await asyncio.gather(settling, *tasks, return_exceptions=True)
        with contextlib.suppress(DatabaseError):  # leases expire by themselves
            await gateway.leases.release()


def _begin(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Begin background work; the log tells if it fails, since nobody waits for its end."""

    def note_end(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("background work failed; restart the gateway", exc_info=error)

    task = asyncio.create_task(work)
    task.add_done_callback(note_end)
    return task


def _background(gateway: Gateway) -> Iterator[Coroutine[Any, Any, None]]:
    """The work that runs until the gateway's end."""
    bases = gateway.bases
    yield _sweep(gateway)
    watch = AdapterWatch(
        gateway.database, bases.models, lambda: [(base.model, base.engines) for base in bases]
    )
    yield _every(TICK_S, watch.tick)
    yield _every(base_follower.TURN_S, gateway.follower.look)
    yield _every(cancels.POLL_S, gateway.cancels.look)
    yield _every(limit_refusals.INTERVAL_S, gateway.limit_refusals.tell)
    yield gateway.prover.run()
    yield gateway.failures.run()
    yield gateway.chores.run()
    yield gateway.drain.run()
    yield gateway.limiter.run()


async def _every(interval_s: float, turn: Callable[[], Awaitable[None]]) -> None:
    """Take a turn at once, and one so many seconds after each; the database may fail for one."""
    while True:
        with contextlib.suppress(DatabaseError):
            await turn()
        await asyncio.sleep(interval_s)


async def _sweep(gateway: Gateway) -> None:
    """Every minute, end uploads whose time is over, discard the parts of ended ones, and write down
    which keys were used.

    Every hour, and at start, purge what was deleted and sweep objects without a row.
    """
    begin, storage, limits = gateway.database.begin, gateway.storage, gateway.registry_limits
    minutely: list[Callable[[int], object]] = [
        functools.partial(sweep_uploads, begin, storage, limits)
    ]
    hourly: list[Callable[[int], object]] = [
        functools.partial(purge, begin, gateway.catalog),
        functools.partial(sweep_objects, begin, storage, limits),
    ]
    for turn in itertools.count():
        await gateway.key_uses.write()
        for sweep in minutely if turn % _SWEEPS_PER_PURGE else minutely + hourly:
            # If the store or the database fails now, the next turn tries again.
            with contextlib.suppress(Fault, StorageError, DatabaseError):
                await asyncio.to_thread(sweep, now_ms())
        await asyncio.sleep(_SWEEP_S)


# ---- errors ----


def _handle_errors(app: FastAPI) -> None:
    for known in KNOWN:
        app.add_exception_handler(known, _render_known)
    app.add_exception_handler(HTTPException, _render_http)


def _render_known(_: Request, error: Exception) -> JSONResponse:
    return error_response(error)


def _render_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(unknown_url(request))
    code = "method_not_allowed" if error.status_code == 405 else None
    told = {"message": str(error.detail), "type": INVALID, "param": None, "code": code}
    return error_response(ErrorAnswer(error.status_code, told, {}))
