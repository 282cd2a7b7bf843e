"""Work on a device beside the engine's steps, on a thread and a stream of its own."""

import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from engine.wire.messages import SILENCE_S
from lora.device import Device

_TURN_S = 0.01
"""How long the thread works before it waits for the loop to ask again, so that it stops with the
loop. A turn is as long as a short step: while the engine serves, the thread rests little.
"""

Result = TypeVar("Result")


class Beside:
    """Does work that reads files and waits for the device, while the engine's loop goes on.

    All of it runs on one stream, so memory that one unit frees is used by the next one.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.stream()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="beside-steps")

    def run(self, unit: Callable[[], Result | None]) -> Generator[None, None, Result]:
        """Repeat a unit of work until it has a result; yields without waiting until then.

        Raises what the unit raises; TimeoutError if the thread is silent for `SILENCE_S`.
        """
        while True:
            turn = self._thread.submit(partial(self._take_turn, unit))
            until = time.monotonic() + SILENCE_S
            while not turn.done():
                if time.monotonic() > until:
                    raise TimeoutError(f"a file or the device has not answered for {SILENCE_S} s")
                yield
            if (result := turn.result()) is not None:
                return result

    def _take_turn(self, unit: Callable[[], Result | None]) -> Result | None:
        until = time.monotonic() + _TURN_S
        while (result := self._do(unit)) is None and time.monotonic() < until:
            pass
        return result

    def _do(self, unit: Callable[[], Result]) -> Result:
        """Do a unit, and wait until the device has done it, too."""
        results: list[Result] = []
        self._device.submit(self._stream, lambda: results.append(unit()))
        self._device.synchronize(self._device.record(self._stream))
        return results[0]
