"""Two kinds of failure: this request's, or the whole engine's.

EngineError
├── EngineDeadError    it is gone; every request in flight has ended, and it is being restarted
│   └── EngineAwayError    it was gone, or leaves, and never had this request: another may have it
├── UnsupportedModel   it cannot start on this checkpoint, now or later
└── RequestRefused     it did not accept this request; nothing was generated or counted
"""


class EngineError(Exception):
    """The base of the tree."""


class EngineDeadError(EngineError):
    """Nothing was lost: what was generated is in the journal and rated 0."""


class EngineAwayError(EngineDeadError):
    """Nothing was sent, or it was turned away unread: no journal can know of it."""


class UnsupportedModel(EngineError):
    """This checkpoint is not what the engine serves; the sentence says what about it."""


class RequestRefused(EngineError):
    """reason: one word, such as `queue_full`."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)
