"""The error for uploads that have to wait because the gateway is busy."""

from registry.errors import Unavailable


def uploads_busy(message: str) -> Unavailable:
    return Unavailable(message, code="uploads_busy", retry_after_s=2.0)
