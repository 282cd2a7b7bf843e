"""How long a client goes on where something failed that may pass."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from server.client.http import ClientError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """max_failures: of one step, in a row.   max_pause_s: between two of them.

    turn_wait_s: in total, for a quota's room for another upload, where the server says when.
    proof_wait_s: for the end of an upload, once it is asked for.   sleep, clock: for tests.
    """

    max_failures: int = 5
    max_pause_s: float = 10.0
    turn_wait_s: float = 30.0
    proof_wait_s: float = 900.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def insist(self, call: Callable[[], T]) -> T:
        """What the call returns, when it does. Raises the ClientError that will not pass."""
        failures = 0
        while True:
            try:
                return call()
            except ClientError as error:
                failures += 1
                self.pause(error, failures)

    def pause(self, error: ClientError, failures: int) -> None:
        """As long as the server asks for, or longer each time. Raises the error if it is over."""
        if failures > self.max_failures or not error.is_passing:
            raise error
        pause_s = error.retry_after_s or 0.5 * 2**failures
        self.sleep(min(pause_s, self.max_pause_s))
