"""How long a client keeps trying after failures that may pass."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from server.client.http import ClientError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Limits of a client's retries and waits.

    max_failures: most failures of one step in a row.   max_pause_s: longest pause between two.
    turn_wait_s: longest wait in total for a quota that has no room for another upload, if the
    server says when it will.   proof_wait_s: longest wait for the end of an upload, once it is
    asked for.   sleep, clock: for tests.
    """

    max_failures: int = 5
    max_pause_s: float = 10.0
    turn_wait_s: float = 30.0
    proof_wait_s: float = 900.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def insist(self, call: Callable[[], T]) -> T:
        """Repeat a call until it returns. Raises the ClientError that will not pass."""
        failures = 0
        while True:
            try:
                return call()
            except ClientError as error:
                failures += 1
                self.pause(error, failures)

    def pause(self, error: ClientError, failures: int) -> None:
        """Sleep for as long as the server asks, or longer each time, `max_pause_s` at most.

        Raises the error if it will not pass, or if there were too many failures.
        """
        if failures > self.max_failures or not error.is_passing:
            raise error
        pause_s = error.retry_after_s or 0.5 * 2**failures
        self.sleep(min(pause_s, self.max_pause_s))
