"""How an engine leaves its pool: announced, with every request at its end, and all of it settled.

announced      gateways send it nothing new; what is on its way is still taken
refusing       after the grace: what comes now goes to another engine
over           its requests have ended and its journal is settled; or nobody is there to do either

Its folder then belongs to `engine.retired`, until every hold that it had is resolved; a file in it
says that this has happened, and is gone as soon as an engine runs there again.
"""

import time
from collections.abc import Callable
from pathlib import Path

from engine.messages import AddRequest, RequestOutput, StepOutputs

LEAVING = "leaving"
"""The error of a request that came too late."""
GRACE_S = 1.0
"""Longer than a gateway takes from its choice of an engine to the request's arrival there."""


class Leaving:
    """From the first `begin` on, which may be called by a signal handler.

    timeout_s: after so long it is over anyway; who comes after ends what is open.
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
        """is_settled: no request is left, and nothing of them to be read from the journal."""
        if not self.has_begun:
            return False
        if not has_gateways or self._lasts_s >= self.timeout_s:
            return True
        return self.refuses and is_settled

    @property
    def _lasts_s(self) -> float:
        return -1.0 if self._began_at is None else self._clock() - self._began_at


def refusal(request: AddRequest) -> StepOutputs:
    """It was not accepted, so the journal knows nothing of it: another engine may have it."""
    output = RequestOutput(
        request_id=request.request_id, seq=0, finish_reason="error", error=LEAVING, is_last=True
    )
    return StepOutputs(outputs=(output,))


def is_settled(directory: Path) -> bool:
    """Whether nothing of this engine's folder can matter to anybody any more."""
    return not (directory / "journal").is_dir() or _mark(directory).exists()


def mark_settled(directory: Path) -> None:
    _mark(directory).touch()


def forget_settled(directory: Path) -> None:
    """An engine runs there again."""
    _mark(directory).unlink(missing_ok=True)


def _mark(directory: Path) -> Path:
    return directory / "settled"
