"""Opening of uploads: the files of a new version, of a dry run, or of one that is proved again."""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, func, select

from registry.base.base_model import BaseModel
from registry.base.base_models import BaseModels
from registry.catalog import adapter_rows
from registry.catalog.adapter_rows import READY, Version
from registry.catalog.catalog import Catalog
from registry.catalog.names import check_alias, check_new_name
from registry.errors import Conflict, Invalid, ObjectNotFound, shown
from registry.storage.storage import Storage
from registry.tables import adapter_versions as versions
from registry.tables import upload_files, uploads
from registry.uploads import presigned
from registry.uploads.ends import publish
from registry.uploads.rows import (
    COMPLETE,
    OPEN,
    PRESIGNED,
    PROVING,
    Upload,
    UploadFile,
    insert_upload,
)
from registry.uploads.rules import RegistryLimits, check_files, check_quotas

# Adapter name of a dry run; no adapter can have this name.
_DRY_RUN_NAME = "-"


def new_upload(
    tenant_id: str,
    key_id: str,
    name: str | None,
    files: Mapping[str, UploadFile],
    now_ms: int,
    **fields: Any,
) -> Upload:
    """The upload that a tenant asks for, before `open_upload` or `prove_again` has checked it.

    name: of the adapter; None for a dry run, whose files are only checked.
    files: those that will be sent; none to prove an object that is stored already.
    fields: more of Upload's.
    """
    return Upload(
        upload_id=f"up_{secrets.token_hex(16)}",
        tenant_id=tenant_id,
        adapter_name=_DRY_RUN_NAME if name is None else name,
        state=OPEN,
        created_by_key=key_id,
        created_at_ms=now_ms,
        expires_at_ms=now_ms,
        files=dict(sorted(files.items())),
        is_dry_run=name is None,
        **fields,
    )


def open_upload(
    conn: Connection,
    upload: Upload,
    catalog: Catalog,
    storage: Storage,
    limits: RegistryLimits,
    known: Version | None = None,
) -> Upload:
    """Declare the files of a new version or of a dry run.

    limits: the tenant's.
    known: the version that `find_known` found, if its object exists. Its files are not sent
    again: the upload is complete at once, and `latest` and the alias move to that version.
    Raises Invalid, TooLarge, QuotaExceeded, Limited.
    """
    if not upload.is_dry_run:
        check_new_name(upload.adapter_name, catalog.bases.names)
    if upload.alias is not None:
        check_alias(upload.alias)
    check_files(upload.files, limits)
    catalog.bases.candidates(upload.base_model)
    if upload.transfer == PRESIGNED:
        presigned.storage_of(storage)
    upload = replace(upload, expires_at_ms=upload.created_at_ms + limits.upload_ttl_s * 1000)
    adapter_rows.lock_tenant(conn, upload.tenant_id)
    if known is not None and known != find_known(conn, upload, catalog.bases):
        known = None
    check_quotas(conn, upload, limits, is_known=known is not None)
    if known is not None:
        arrived = [replace(it, received_bytes=it.size_bytes) for it in upload.files.values()]
        upload = replace(upload, files={it.filename: it for it in arrived})
    insert_upload(conn, upload)
    return publish(conn, catalog, upload, known.built) if known is not None else upload


def find_known(conn: Connection, upload: Upload, bases: BaseModels) -> Version | None:
    """The ready version that was made from exactly these files, with this format of calls.

    It is for the base model that the upload names, or for any that is served. Raises Invalid.
    """
    wanted = bases.candidates(upload.base_model)
    found = _versions_of_files(conn, upload)
    return next((it for it in found if bases.serving(it.base) in wanted), None)


def has_object(storage: Storage, version: Version) -> bool:
    """Whether the store has the version's object; a lost object must be uploaded again."""
    try:
        return storage.size(version.object_key) == version.size_bytes
    except ObjectNotFound:
        return False


def prove_again(
    conn: Connection,
    upload: Upload,
    number: int,
    catalog: Catalog,
    limits: RegistryLimits,
) -> Upload:
    """Open an upload that proves a version on another base model than the one it is for.

    The object stays the same and no file is sent: the upload is proving from the start.
    upload: its base_model names the other base model; None for the only other one that is served.
    limits: the tenant's. Raises NotFound, Conflict, Invalid, QuotaExceeded, Limited.
    """
    if upload.alias is not None:
        check_alias(upload.alias)
    adapter_rows.lock_tenant(conn, upload.tenant_id)
    version = catalog.get_version(conn, upload.tenant_id, upload.adapter_name, number)
    base = _other_base(catalog.bases, upload, version)
    if version.tokenizer is not None:
        raise Invalid(
            code="tokenizer_mismatch",
            message=f"Version {number} has a tokenizer or a chat template of its own, which was "
            "compared with its base model's; upload its files again for the other base model.",
            param="base_model",
        )
    built = replace(
        version.built,
        base_revision=base.base_revision,
        base_model=base.model_id,
        base_variant=base.variant,
        passport={**version.passport, "canary": None},
    )
    upload = replace(
        upload,
        state=PROVING,
        expires_at_ms=upload.created_at_ms + limits.proof_ttl_s * 1000,
        built=built,
        response_template=version.response_template,
    )
    check_quotas(conn, upload, limits)
    insert_upload(conn, upload)
    return upload


def _other_base(bases: BaseModels, upload: Upload, version: Version) -> BaseModel:
    """The base model to prove the version on, see `prove_again`."""
    candidates = bases.candidates(upload.base_model)
    its_own = bases.serving(version.base)
    others = [base for base in candidates if base is not its_own]
    if not others:
        what = f"Version {version.version} of {shown(upload.adapter_name)}"
        raise Conflict(f"{what} is for this base model; use it.", code="already_proved")
    if len({base.variant for base in others}) > 1:
        names = ", ".join(base.model_id for base in others)
        raise Invalid(
            code="base_model_unclear",
            message=f"The version can be proved on one of {names}; name it with base_model.",
            param="base_model",
        )
    return others[0]


def _versions_of_files(conn: Connection, upload: Upload) -> Iterator[Version]:
    """The ready versions that were made from files with exactly these sha256 and no others, for
    this format, the newest first.
    """
    num_files = (
        select(func.count())
        .where(
            upload_files.c.upload_id == uploads.c.upload_id,
            upload_files.c.tenant_id == upload.tenant_id,
        )
        .scalar_subquery()
    )
    query = (
        select(uploads.c.adapter_id, uploads.c.version)
        .distinct()
        .join(versions, adapter_rows.is_meant_by(uploads))
        .where(
            uploads.c.tenant_id == upload.tenant_id,
            uploads.c.adapter_name == upload.adapter_name,
            uploads.c.state == COMPLETE,
            versions.c.tenant_id == upload.tenant_id,
            versions.c.state == READY,
            versions.c.response_template == upload.response_template,
            num_files == len(upload.files),
        )
    )
    for filename, wanted in upload.files.items():
        file = upload_files.alias()
        query = query.join(
            file,
            (file.c.upload_id == uploads.c.upload_id)
            & (file.c.tenant_id == upload.tenant_id)
            & (file.c.filename == filename)
            & (file.c.sha256 == wanted.sha256),
        )
    for row in conn.execute(query.order_by(uploads.c.version.desc())).all():
        if version := adapter_rows.find_version_row(
            conn, upload.tenant_id, row.adapter_id, row.version
        ):
            yield version
