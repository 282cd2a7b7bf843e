"""The attempts of a request for a route: how each ended, and whether another one follows.

Attempt n of the request `id` is a request of its own, `id.n`, with a hold and a receipt of its own.
"""

import re
from collections.abc import Iterable
from enum import StrEnum
from math import fsum

from engine.wire.messages import RequestOutput
from registry.errors import Damaged, Failed, Invalid, NotFound, Overloaded, TimedOut, Unavailable
from server.inference.route import MAX_MODELS
from server.limits.rules import RateLimited

_ATTEMPT_ID = re.compile(rf"(.+)\.[1-{MAX_MODELS}]")
_UNSERVABLE = ("adapter_incompatible", "adapter_too_large", "request_too_long")
"""Codes of a 400 that is about the model's adapter, and not only about what the caller sent."""


class Outcome(StrEnum):
    """The end of an attempt, in the word that a header tells.

    The first is the answer. After the next seven it is another model's turn. The last two are about
    the caller, or the request's time, and would be the same at every model.
    """

    ANSWERED = "answered"
    WEAK = "weak"  # an answer, less likely than its model's min_mean_logprob
    OVERLOADED = "overloaded"
    LATE = "late"  # no first token in time
    UNAVAILABLE = "unavailable"  # no engine, or the adapter is still being loaded
    LIMITED = "limited"  # by the limits of the model's adapter or base
    MISSING = "missing"  # no such model, or an adapter that cannot be served
    FAILED = "failed"
    REFUSED = "refused"
    TIMED_OUT = "timed_out"

    @property
    def is_end(self) -> bool:
        """Whether no attempt follows."""
        return self in (Outcome.ANSWERED, Outcome.REFUSED, Outcome.TIMED_OUT)


def outcome_of(error: Exception) -> Outcome:
    """The outcome of an attempt that ended with an error before its answer began."""
    match error:
        case RateLimited():
            is_own = error.limit.scope in ("adapter", "base")
            return Outcome.LIMITED if is_own else Outcome.REFUSED
        case Overloaded():
            is_late = error.code == "first_token_timeout"
            return Outcome.LATE if is_late else Outcome.OVERLOADED
        case Unavailable():
            return Outcome.UNAVAILABLE
        case NotFound() | Damaged():
            return Outcome.MISSING
        case Invalid() if error.code in _UNSERVABLE:
            return Outcome.MISSING
        case Failed():
            return Outcome.FAILED
        case TimedOut():
            return Outcome.TIMED_OUT
    return Outcome.REFUSED


def least_mean_logprob(outputs: Iterable[RequestOutput]) -> float:
    """The mean logprob of the tokens of that answer of a request whose mean is the least.

    outputs: all of the request's, with logprobs. An answer without tokens has a mean of 0.
    """
    logprobs: dict[int, list[float]] = {}
    for output in outputs:
        named = logprobs.setdefault(output.index, [])
        named += [max(token.logprob, -1e300) for token in output.logprobs or ()]
    means = [fsum(named) / len(named) for named in logprobs.values() if named]
    return min(means, default=0.0)


def attempt_id(request_id: str, place: int) -> str:
    """The request id of the attempt at the model of this place, which is counted from 0."""
    return f"{request_id}.{place + 1}"


def attempt_ids(request_id: str) -> list[str]:
    """The request ids of all attempts that a request may have."""
    return [attempt_id(request_id, place) for place in range(MAX_MODELS)]


def parent_of(request_id: str) -> str | None:
    """The request id of the request that an attempt belongs to; None for other requests."""
    match = _ATTEMPT_ID.fullmatch(request_id)
    return match[1] if match else None
