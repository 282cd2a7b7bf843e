"""Rules for when a failed adapter is tried again, and how often a lost file is fetched again."""

from collections.abc import Callable

from lora.entry import Entry
from lora.errors import Failure, FailureKind

_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 30.0
_NEVER = float("inf")
_MOST_LOST: dict[FailureKind, int] = {"lost": 1, "evicted": 8}
"""Losses in a row that a new fetch may mend; more mean a faulty disk or far too small a cache."""


class Retries:
    """Notes failures in an adapter's entry, and decides from them whether it may be tried again.

    clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def fail(self, entry: Entry, failure: Failure) -> None:
        """Note why the adapter is not available, and when it may be tried again."""
        entry.failure = failure
        entry.num_failures += 1
        entry.num_lost = 0
        entry.retry_at = self._clock() + _retry_s(failure.kind, entry.num_failures)

    def forgive(self, entry: Entry) -> None:
        """Forget an adapter's failures, since it has reached the arena."""
        entry.failure, entry.num_failures, entry.num_lost = None, 0, 0

    def may_fetch_again(self, entry: Entry, failure: Failure) -> bool:
        """Whether another fetch may mend this failure to read the packed file."""
        return entry.num_lost < _MOST_LOST.get(failure.kind, 0)

    def may_try_again(self, entry: Entry) -> bool:
        return entry.tier == "failed" and self._clock() >= entry.retry_at

    def retry_after_s(self, entry: Entry) -> float:
        """Seconds after which a request for an adapter that failed may be repeated."""
        return max(_FIRST_RETRY_S, entry.retry_at - self._clock())


def _retry_s(kind: FailureKind, num_failures: int) -> float:
    """Seconds during which requests for the adapter fail at once, until it is tried again.

    A missing or damaged object may be uploaded again, so it is retried; an adapter that does not
    fit never will.
    """
    if kind in ("incompatible", "too_large"):
        return _NEVER
    return float(min(_FIRST_RETRY_S * 2 ** (num_failures - 1), _LONGEST_RETRY_S))
