"""Build of an upload in a worker thread: short transactions around long work on bytes."""

from sqlalchemy import Connection

from registry import part_rows, presigned, upload_proof, upload_rows
from registry.build import BuildPlan, BuiltAdapter, build_adapter
from registry.errors import Invalid, ObjectNotFound, TooLarge, UploadNotComplete
from registry.sweep import discard
from registry.transactions import Begin
from registry.upload_rows import FAILED, OPEN, PRESIGNED, Upload, UploadPart
from registry.uploads import Uploads


def build_upload(uploads: Uploads, begin: Begin, tenant_id: str, upload_id: str) -> Upload:
    """Assemble and check the files and store the object; then the upload is proving or complete.

    An upload that is proving or complete already is returned unchanged. Raises UploadNotFound,
    UploadNotOpen, UploadNotComplete; InvalidAdapter or TooLarge for a fault of the files, and
    UnknownBaseModel if the named base model is no longer served, which end the upload; NoRoom,
    StorageError or ValidatorUnavailable for a fault of ours, after which the call may be repeated.
    """
    with begin() as conn:
        upload = uploads.get_upload(conn, tenant_id, upload_id)
        if upload.state != OPEN:
            return upload_proof.ended(upload)
        parts = tuple(part_rows.list_parts(conn, tenant_id, upload_id))
    try:
        if upload.transfer == PRESIGNED:
            storage = uploads.presigned_storage()
            parts = presigned.complete_files(storage, upload, uploads.limits.part_bytes)
        else:
            _check_received(upload)
        built = _build(uploads, upload, parts)
    except (Invalid, TooLarge) as error:
        with begin() as conn:
            _fail(conn, upload, error)
        discard(uploads, begin, upload)
        raise
    except ObjectNotFound:
        # The parts are gone: another call completed the upload meanwhile, or it has expired.
        with begin() as conn:
            upload = uploads.get_upload(conn, tenant_id, upload_id)
        if upload.state == OPEN:
            raise
        return upload_proof.ended(upload)
    # If start_proof fails, the object is an orphan, which the sweep deletes.
    with begin() as conn:
        upload = upload_proof.start_proof(uploads, conn, built)
    discard(uploads, begin, upload)
    return upload


def _check_received(upload: Upload) -> None:
    missing = {
        file.filename: file.size_bytes - file.received_bytes
        for file in upload.files.values()
        if file.received_bytes < file.size_bytes
    }
    if missing:
        raise UploadNotComplete(missing_bytes=missing)


def _build(uploads: Uploads, upload: Upload, parts: tuple[UploadPart, ...]) -> BuiltAdapter:
    bases = uploads.catalog.bases.candidates(upload.base_model)
    plan = BuildPlan(upload, parts, bases)
    return build_adapter(plan, uploads.validator, uploads.storage, uploads.work)


def _fail(conn: Connection, upload: Upload, error: Invalid | TooLarge) -> None:
    """End the upload with the fault of its files; an upload that has ended stays unchanged."""
    upload_rows.move_upload(
        conn,
        upload,
        FAILED,
        error_code=error.code,
        error_param=error.param,
        error=str(error),
    )
