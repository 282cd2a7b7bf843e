"""The end of an upload from a worker thread: short transactions around long work on bytes."""

from registry.adapter_rows import Version
from registry.errors import Invalid, ObjectNotFound, RegistryError, StorageError, TooLarge
from registry.upload_rows import Upload
from registry.uploads import Begin, Uploads


def complete_upload(uploads: Uploads, begin: Begin, tenant_id: str, upload_id: str) -> Version:
    """The version that the upload becomes, or already became.

    Raises as Uploads.prepare_complete and Uploads.build. A fault of the files ends the upload; a
    fault of the store does not, complete may be asked again. Either way nothing is left behind.
    """
    with begin() as conn:
        plan = uploads.prepare_complete(conn, tenant_id, upload_id)
    if plan.version is not None:
        return plan.version
    try:
        built = uploads.build(plan)
    except (Invalid, TooLarge) as error:
        with begin() as conn:
            uploads.fail_complete(conn, plan.upload, error)
        _discard(uploads, begin, plan.upload)
        raise
    except ObjectNotFound:
        # The parts are gone: the same upload was completed beside us, or has expired.
        with begin() as conn:
            plan = uploads.prepare_complete(conn, tenant_id, upload_id)
        if plan.version is None:
            raise
        return plan.version
    try:
        with begin() as conn:
            version = uploads.finish_complete(conn, built)
    except RegistryError:
        with begin() as conn:
            uploads.discard_object(conn, built)
        raise
    _discard(uploads, begin, plan.upload)
    return version


def sweep_uploads(uploads: Uploads, begin: Begin) -> int:
    """Expire uploads and discard what closed ones left. Returns how many were discarded."""
    with begin() as conn:
        closed = uploads.expire_uploads(conn)
    return sum(_discard(uploads, begin, upload) for upload in closed)


def _discard(uploads: Uploads, begin: Begin, upload: Upload) -> bool:
    try:
        uploads.discard_parts(upload)
    except StorageError:
        # How the upload ended does not depend on it, and the next sweep finds it again.
        return False
    with begin() as conn:
        uploads.forget_parts(conn, upload)
    return True
