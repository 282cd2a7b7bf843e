"""Two kinds of failure: this request's, or the whole engine's.

EngineError
├── EngineDeadError    the engine is gone; every request in flight has ended, and it is being
restarted └── RequestRefused     the engine did not accept this request; nothing was generated or
counted
"""


class EngineError(Exception):
    """The base of the tree."""


class EngineDeadError(EngineError):
    """Nothing was lost: what was generated is in the journal and rated 0."""


class RequestRefused(EngineError):
    """reason: one word, such as `queue_full`."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)
