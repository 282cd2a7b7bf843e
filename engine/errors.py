"""Failures of one request, or of the whole engine.

EngineDeadError    the engine is gone and restarts; its requests in flight have ended
├── EngineAwayError    it was gone, or leaves, before this request: another engine may take it
│   └── EngineProves       it takes no request for a moment, and will again
├── EngineDied         it ended while it had the request
└── FirstTokenLate     it lives, as far as is known, but did not even end the request in time
UnsupportedModel   the engine cannot start on this checkpoint, now or later
RequestRefused     the engine did not accept the request; nothing was generated or counted
"""


class EngineDeadError(Exception):
    """The engine is gone. No count is lost: what was generated is in its journal, and rated 0."""


class EngineAwayError(EngineDeadError):
    """The request was not sent, or was turned away unread, so that no journal contains it."""


class EngineProves(EngineAwayError):
    """The engine does nothing but prove an adapter, since another engine ended while proving it."""


class EngineDied(EngineDeadError):
    """The engine ended while it had the request.   start: the engine's id and its epoch."""

    def __init__(self, start: str) -> None:
        super().__init__("the engine died")
        self.start = start


class FirstTokenLate(EngineDeadError):
    """No token came in time, and the engine did not end the request itself, as it should have."""


class UnsupportedModel(Exception):
    """The engine cannot serve this checkpoint, or not with these settings; the message says why."""


class RequestRefused(Exception):
    """The engine refused a request. reason: one word, such as `queue_full`."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)
