"""Errors of other modules, as a customer is told of them: each family has its status here."""

from collections.abc import Callable
from typing import Any

from registry import errors as registry_errors
from registry.errors import RegistryError
from server.accounts.auth import AuthError, InvalidApiKey, TenantSuspended
from server.accounts.keys import BeyondRights, InvalidKey, KeyEnded, KeyNotFound, TooManyKeys
from server.accounts.tenants import InvalidTenant, TenantError, TenantNameTaken, TenantNotFound
from server.api import errors
from server.api.errors import ApiError
from server.api.limit_headers import refusal_headers
from server.database.database import DatabaseError
from server.limits.rules import RateLimited


def from_rate_limit(error: RateLimited) -> ApiError:
    """A limiter that lost its state says so: it may refuse what it would let pass otherwise."""
    limited = errors.rate_limited(
        str(error), retry_after_s=error.retry_after_ms / 1000, headers=refusal_headers(error)
    )
    if error.is_degraded:
        limited.details = {"limiter_degraded": True}
    return limited


def from_auth(error: AuthError) -> ApiError:
    match error:
        case InvalidApiKey():
            return errors.invalid_api_key()
        case TenantSuspended():
            return errors.tenant_suspended()
        case KeyNotFound():
            return errors.not_found(str(error), code="key_not_found", param="key_id")
        case InvalidKey():
            return errors.invalid_request(str(error), param=error.param)
        case BeyondRights():
            return errors.permission_error(str(error), param=error.param)
        case KeyEnded():
            return errors.conflict(str(error), code="key_ended", param="key_id")
        case TooManyKeys():
            return errors.insufficient_quota(str(error), code="max_keys")
    raise AssertionError(f"unmapped {type(error).__name__}")


def from_tenants(error: TenantError) -> ApiError:
    match error:
        case InvalidTenant():
            return errors.invalid_request(str(error), param=error.param)
        case TenantNotFound():
            return errors.not_found(str(error), code="tenant_not_found", param="tenant")
        case TenantNameTaken():
            return errors.conflict(str(error), code="tenant_name_taken", param="name")
    raise AssertionError(f"unmapped {type(error).__name__}")


def from_database(error: DatabaseError) -> ApiError:
    """Which database, and what is wrong with it, is for the log."""
    return errors.metering_unavailable()


def from_registry(error: RegistryError) -> ApiError:
    """By family: the registry names the fault, this gives it a status."""
    match error:
        case registry_errors.Invalid():
            return errors.invalid_request(str(error), param=error.param, code=error.code)
        case registry_errors.NotFound():
            return errors.not_found(str(error), code=error.code, param=error.param)
        case registry_errors.UploadOffsetMismatch():
            mismatch = errors.conflict(str(error), code=error.code, param=error.param)
            mismatch.details = {"received_bytes": error.received_bytes}
            return mismatch
        case registry_errors.Conflict():
            return errors.conflict(str(error), code=error.code, param=error.param)
        case registry_errors.TooLarge():
            return ApiError(413, str(error), code=error.code, param=error.param)
        case registry_errors.QuotaExceeded():
            if error.retry_after_s is not None:
                return errors.rate_limited(str(error), retry_after_s=error.retry_after_s)
            return errors.insufficient_quota(str(error), code=error.code)
        case registry_errors.ValidatorUnavailable():
            return errors.service_unavailable(str(error), code=error.code, retry_after_s=5.0)
        case registry_errors.StorageError():
            # Not its own words: they name the object's key.
            message = "The adapter store is not available. Try again shortly."
            return errors.service_unavailable(
                message, code="storage_unavailable", retry_after_s=2.0
            )
    raise AssertionError(f"unmapped {type(error).__name__}")


FAMILIES: dict[type[Exception], Callable[[Any], ApiError]] = {
    RegistryError: from_registry,
    AuthError: from_auth,
    TenantError: from_tenants,
    DatabaseError: from_database,
    RateLimited: from_rate_limit,
}
