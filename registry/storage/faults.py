"""Faults of an object store: what is kept of the last one, and what an operator does about it."""

import logging
import math
import time
from collections.abc import Callable

from registry.errors import StorageError

_log = logging.getLogger(__name__)

_QUIET_S = 60.0
"""Age from which the same fault is worth another line of the log."""
_NO_ACCESS = "Allow the store's key to get, put, delete and list objects of the bucket."
_OTHER_REGION = "Add the bucket's region to `storage`: ?region=..."
_NO_CREDENTIALS = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the machine's role."

REMEDIES = {
    "NoCredentialsError": _NO_CREDENTIALS,
    "PartialCredentialsError": _NO_CREDENTIALS,
    "InvalidAccessKeyId": "Give the key of this store: AWS_ACCESS_KEY_ID.",
    "SignatureDoesNotMatch": "Mend AWS_SECRET_ACCESS_KEY.",
    "ExpiredToken": "Renew AWS_SESSION_TOKEN, or use the machine's role.",
    "AccessDenied": _NO_ACCESS,
    "403": _NO_ACCESS,
    "NoSuchBucket": "Make the bucket, or mend its name in `storage`.",
    "AuthorizationHeaderMalformed": _OTHER_REGION,
    "PermanentRedirect": _OTHER_REGION,
    "RequestTimeTooSkewed": "Set this machine's clock.",
    "SSLError": "Have AWS_CA_BUNDLE name the authority of the store's certificate, or renew it.",
    "EndpointConnectionError": "Mend endpoint_url in `storage`, or start the store.",
}
"""Remedies by the code of the store or the error of boto3; faults without one may pass."""


class StorageFaults:
    """Logs the faults of a store, and keeps the reason of the last one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.reason = ""
        self._at_s = -math.inf

    def error(self, key: str, reason: str) -> StorageError:
        """An error of the object under `key`, to be raised."""
        if reason != self.reason or self.age_s() > _QUIET_S:
            _log.warning("The object store failed: %s. %s", reason, REMEDIES.get(reason, ""))
        self.reason, self._at_s = reason, self._clock()
        return StorageError(key=key, reason=reason)

    def age_s(self) -> float:
        """Seconds since the last fault, infinite if there was none."""
        return self._clock() - self._at_s
