"""Loads base models beside the supervisor's loop, one at a time: hashing a large one is slow."""

import threading
from collections.abc import Callable

from server.launch.loaded_model import LoadedModel
from server.launch.settings import Settings

Load = Callable[[Settings], LoadedModel]
Work = Callable[[], None]


def on_a_thread(work: Work) -> None:
    """Begin `work` on a thread that does not outlive the process."""
    threading.Thread(target=work, name="model loader", daemon=True).start()


class ModelLoader:
    """Loads the model of one settings at a time.

    load: raises ServeError or OSError for a model that cannot be served.   start: begins the work
    and returns at once.
    """

    def __init__(
        self, load: Load = LoadedModel.load, start: Callable[[Work], None] = on_a_thread
    ) -> None:
        self.load = load
        self._start = start
        self._result: list[LoadedModel | Exception] = []
        self.is_busy = False

    def begin(self, settings: Settings) -> None:
        assert not self.is_busy
        self.is_busy = True

        def work() -> None:
            try:
                self._result.append(self.load(settings))
            except Exception as error:
                # An operator's addition must not end what is served, whatever its files are like.
                self._result.append(error)

        self._start(work)

    def take(self) -> LoadedModel | Exception | None:
        """The model that was loaded, or why it was not; None while the work goes on."""
        if not self._result:
            return None
        self.is_busy = False
        return self._result.pop()
