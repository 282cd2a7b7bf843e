"""When an adapter that failed is tried again, and how often one that the disk lost is fetched."""

from collections.abc import Callable

from lora.entry import Entry
from lora.errors import Failure, FailureKind

_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 30.0
_NEVER = float("inf")
_MOST_LOST: dict[FailureKind, int] = {"lost": 1, "evicted": 8}
"""In a row: then something is wrong with the disk, or its cache is far too small."""


class Retries:
    """Notes failures in an adapter's entry, and reads from them what may be tried now.

    clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def fail(self, entry: Entry, failure: Failure) -> None:
        """Note why the adapter cannot be had, and when its next try is."""
        entry.failure = failure
        entry.num_failures += 1
        entry.num_lost = 0
        entry.retry_at = self._clock() + _retry_s(failure.kind, entry.num_failures)

    def forgive(self, entry: Entry) -> None:
        """Forget what went wrong on the way: the adapter is in the arena."""
        entry.failure, entry.num_failures, entry.num_lost = None, 0, 0

    def may_fetch_again(self, entry: Entry, failure: Failure) -> bool:
        """Whether another fetch may mend this failure to read what was on disk."""
        return entry.num_lost < _MOST_LOST.get(failure.kind, 0)

    def may_try_again(self, entry: Entry) -> bool:
        return entry.tier == "failed" and self._clock() >= entry.retry_at

    def retry_after_s(self, entry: Entry) -> float:
        """Seconds after which it is worth asking again for what could not be had."""
        return max(_FIRST_RETRY_S, entry.retry_at - self._clock())


def _retry_s(kind: FailureKind, num_failures: int) -> float:
    """How long requests for it fail at once, before it is tried again.

    What is missing or damaged may have been uploaded again; what does not fit never will.
    """
    if kind in ("incompatible", "too_large"):
        return _NEVER
    return float(min(_FIRST_RETRY_S * 2 ** (num_failures - 1), _LONGEST_RETRY_S))
