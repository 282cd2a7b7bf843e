"""The end of an upload from a worker thread: short transactions around long work on bytes."""

from registry.adapter_rows import Version
from registry.errors import Invalid, ObjectNotFound, RegistryError, StorageError, TooLarge
from registry.service import Begin, Registry
from registry.upload_rows import Upload


def complete_upload(registry: Registry, begin: Begin, tenant_id: str, upload_id: str) -> Version:
    """The version that the upload becomes, or already became.

    Raises as Registry.prepare_complete and Registry.build. A fault of the files ends the upload; a
    fault of the store does not, complete may be asked again. Either way nothing is left behind.
    """
    with begin() as conn:
        plan = registry.prepare_complete(conn, tenant_id, upload_id)
    if plan.version is not None:
        return plan.version
    try:
        built = registry.build(plan)
    except (Invalid, TooLarge) as error:
        with begin() as conn:
            registry.fail_complete(conn, plan.upload, error)
        _discard(registry, begin, plan.upload)
        raise
    except ObjectNotFound:
        # The parts are gone: the same upload was completed beside us, or has expired.
        with begin() as conn:
            plan = registry.prepare_complete(conn, tenant_id, upload_id)
        if plan.version is None:
            raise
        return plan.version
    try:
        with begin() as conn:
            version = registry.finish_complete(conn, built)
    except RegistryError:
        with begin() as conn:
            registry.discard_object(conn, built)
        raise
    _discard(registry, begin, plan.upload)
    return version


def sweep_uploads(registry: Registry, begin: Begin) -> int:
    """Expire uploads and discard what closed ones left. Returns how many were discarded."""
    with begin() as conn:
        closed = registry.expire_uploads(conn)
    return sum(_discard(registry, begin, upload) for upload in closed)


def _discard(registry: Registry, begin: Begin, upload: Upload) -> bool:
    try:
        registry.discard_parts(upload)
    except StorageError:
        # How the upload ended does not depend on it, and the next sweep finds it again.
        return False
    with begin() as conn:
        registry.forget_parts(conn, upload)
    return True
