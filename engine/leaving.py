"""How an engine leaves its pool: announced, with every request ended and its journal settled.

announced      gateways send it no new requests; those on their way are still accepted
refusing       after the grace period: requests that arrive now go to another engine
over           all requests have ended and the journal is settled, or no gateway is left, or the
               timeout has passed

Its folder then belongs to `engine.retired` until every hold on the engine is resolved. A file in
the folder marks that this has happened; it is deleted as soon as an engine runs there again.
"""

import time
from collections.abc import Callable
from pathlib import Path

from engine.wire.messages import AddRequest, RequestOutput, StepOutputs

GRACE_S = 1.0
"""Grace period, longer than from a gateway's choice of an engine to the request's arrival."""


class Leaving:
    """State of leaving, from the first `begin` on, which a signal handler may call.

    timeout_s: time after which leaving is over anyway; the next process ends what is open.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._began_at: float | None = None

    def begin(self) -> None:
        if self._began_at is None:
            self._began_at = self._clock()

    @property
    def has_begun(self) -> bool:
        return self._began_at is not None

    @property
    def refuses(self) -> bool:
        return self._lasts_s >= GRACE_S

    def is_over(self, *, has_gateways: bool, is_settled: bool) -> bool:
        """Whether the process may exit.

        is_settled: whether no request is left, and the journal has no records left to post.
        """
        if not self.has_begun:
            return False
        if not has_gateways or self._lasts_s >= self.timeout_s:
            return True
        return self.refuses and is_settled

    @property
    def _lasts_s(self) -> float:
        return -1.0 if self._began_at is None else self._clock() - self._began_at


def refusal(request: AddRequest, reason: str) -> StepOutputs:
    """Refuse a request for a reason in a word; no journal contains it, so its hold is voided."""
    output = RequestOutput(
        request_id=request.request_id, seq=0, finish_reason="error", error=reason, is_last=True
    )
    return StepOutputs(outputs=(output,))


def is_settled(directory: Path) -> bool:
    """Whether an engine's folder has nothing left to settle: no journal, or a settled one."""
    return not (directory / "journal").is_dir() or _mark(directory).exists()


def mark_settled(directory: Path) -> None:
    _mark(directory).touch()


def forget_settled(directory: Path) -> None:
    """Delete the mark, because an engine runs there again."""
    _mark(directory).unlink(missing_ok=True)


def _mark(directory: Path) -> Path:
    return directory / "settled"
