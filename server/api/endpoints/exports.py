"""The ledger as files: streamed on request, or put into the object store on a schedule."""

import asyncio
from dataclasses import replace
from typing import Annotated, Literal

from fastapi import Query
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from sqlalchemy.engine import Connection

from registry.errors import Invalid
from registry.extras import ExtraMissing
from server.accounts import tenants
from server.api.answer import Answer, ListAnswer
from server.api.bodies import BodyFields, json_body
from server.api.deps import DatabaseDep, UsageKey, operators_router, tenants_router
from server.api.endpoints.statements import check_period
from server.api.times import Time, parse_range
from server.billing.exports import schedules
from server.billing.exports.formats import INFO, Encoder, ExportFormat, open_encoder
from server.billing.exports.pages import Place, Range, last_entry_id, place_of_entry
from server.billing.exports.schedules import Interval, Schedule
from server.billing.exports.stream import stream
from server.database.clock import now_ms
from server.database.database import Database

router = tenants_router()
admin_router = operators_router()

THROUGH = "x-chorale-export-through"
_FOREVER_MS = 2**62

Number = Annotated[int | None, Field(ge=0, lt=2**63)]


class ExportQuery(BaseModel):
    """The receipts to export, and the format of their file."""

    format: ExportFormat = "csv"
    start: Time = None
    end: Time = None
    period: Annotated[str | None, Field(max_length=16)] = None
    after: Number = None
    through: Number = None


class _ExportAllQuery(ExportQuery):
    tenant: Annotated[str | None, Field(max_length=64)] = None


class _NewSchedule(BodyFields):
    """A schedule. interval: how often what is new is exported."""

    interval: Interval


class UsageExport(Answer):
    """A scheduled export. prefix: where its files are in the object store.

    exported_seq: the number of the last receipt that is in the store.   next_at, created_at: Unix
    seconds.   error: the fault of the last try, null once one has succeeded.
    """

    object: Literal["usage.export"] = "usage.export"
    format: ExportFormat
    interval: Interval
    prefix: str = Field(examples=["exports/ten_5f0c1d2e3a4b5968/csv/"])
    exported_seq: int = Field(examples=[1206])
    next_at: int = Field(examples=[1_796_086_800])
    created_at: int = Field(examples=[1_794_787_200])
    error: str | None = Field(examples=[None])


class UsageExportList(ListAnswer[UsageExport]):
    """The scheduled exports of a tenant."""


class UsageExportDeleted(Answer):
    """The answer to the removal of a schedule."""

    object: Literal["usage.export.deleted"] = "usage.export.deleted"
    format: ExportFormat
    deleted: Literal[True] = True


@router.get("/usage/export")
async def export_usage(
    database: DatabaseDep, identity: UsageKey, query: Annotated[ExportQuery, Query()]
) -> StreamingResponse:
    """Export the tenant's receipts as a file.

    The receipts are of what ended in [start, end); without an end, of all that ended since the
    start. Those of a period are the ones that its statement sums up.
    after, through: continue an export after its last entry, with the header of its first answer.
    """
    return await _export(database, identity.tenant_id, query)


@admin_router.get("/usage/export")
async def export_all(
    database: DatabaseDep, query: Annotated[_ExportAllQuery, Query()]
) -> StreamingResponse:
    """Export the receipts of one tenant, given by id or name, or of all tenants in turn.

    tenant: an id or a name; all tenants if it is left out.
    after, through: continue an export after its last entry, with the header of its first answer.
    """
    tenant_id, tenant = None, query.tenant
    if tenant is not None:
        tenant_id = (await database.read(lambda c: tenants.get_tenant(c, tenant))).tenant_id
    return await _export(database, tenant_id, query)


async def _export(
    database: Database, tenant_id: str | None, query: ExportQuery
) -> StreamingResponse:
    start_ms, end_ms = parse_range(query.start, query.end)
    if query.period is not None:
        check_period(query.period)
        if (query.start, query.end) != (None, None):
            raise Invalid("Give a period, or start and end.", param="period")
    encoder = await _open_encoder(query.format)
    _check_resumption(query)

    def begin(conn: Connection) -> tuple[int, Place | None]:
        last = last_entry_id(conn, tenant_id) if query.through is None else query.through
        return last, None if query.after is None else _place(conn, tenant_id, query.after)

    last, place = await database.read(begin)
    within = Range.clamped(tenant_id, start_ms, end_ms if query.end else _FOREVER_MS, last)
    info = INFO[query.format]
    return StreamingResponse(
        stream(database, encoder, replace(within, period=query.period), place),
        media_type=info.media_type,
        headers={
            "content-disposition": f'attachment; filename="usage.{info.extension}"',
            THROUGH: str(last),
        },
    )


async def _open_encoder(format: ExportFormat) -> Encoder:
    try:
        # On a thread: the first export of Parquet imports its library for 0.13 s.
        return await asyncio.to_thread(open_encoder, format)
    except ExtraMissing as error:
        raise Invalid(str(error), param="format", code="format_unavailable") from error


def _check_resumption(query: ExportQuery) -> None:
    if query.after is None:
        return
    if INFO[query.format].encode is None:
        message = f"A file of {query.format} cannot be continued."
        raise Invalid(message, param="after")
    if query.through is None:
        raise Invalid(
            f"after needs through: the header {THROUGH} of the export's first answer.",
            param="through",
        )


def _place(conn: Connection, tenant_id: str | None, after: int) -> Place:
    place = place_of_entry(conn, tenant_id, after)
    if place is None:
        raise Invalid(f"There is no entry {after}.", param="after")
    return place


# ---- to the object store, on a schedule ----


@router.get("/usage/exports")
async def list_schedules(database: DatabaseDep, identity: UsageKey) -> UsageExportList:
    """List the tenant's scheduled exports."""
    found = await database.read(lambda c: schedules.list_of(c, identity.tenant_id))
    return UsageExportList(data=[_schedule(each) for each in found])


@router.put("/usage/exports/{format}")
async def put_schedule(
    format: ExportFormat,
    database: DatabaseDep,
    identity: UsageKey,
    body: Annotated[_NewSchedule, json_body(_NewSchedule)],
) -> UsageExport:
    """Schedule an export of the tenant's receipts to the object store, every hour or every day.

    A new schedule begins with the tenant's first receipt. A changed one keeps what is exported
    already.
    """
    await _open_encoder(format)
    return _schedule(
        await database.write(
            lambda conn: schedules.put_schedule(
                conn,
                identity.tenant_id,
                format,
                schedules.INTERVAL_S[body.interval],
                now_ms(),
                actor=identity.actor,
            )
        )
    )


@router.delete("/usage/exports/{format}")
async def delete_schedule(
    format: ExportFormat, database: DatabaseDep, identity: UsageKey
) -> UsageExportDeleted:
    """Delete the schedule of an export; its files in the object store stay."""
    await database.write(
        lambda conn: schedules.delete_schedule(
            conn, identity.tenant_id, format, now_ms(), actor=identity.actor
        )
    )
    return UsageExportDeleted(format=format)


def _schedule(schedule: Schedule) -> UsageExport:
    intervals = {seconds: name for name, seconds in schedules.INTERVAL_S.items()}
    interval, prefix = intervals[schedule.interval_s], schedules.prefix_of(schedule)
    return UsageExport.of_record(schedule, interval=interval, prefix=prefix)
