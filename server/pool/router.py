"""Routing: a request goes to the engine where its first token costs least, in seconds.

    crowd     how much the requests already there slow it down, or keep it waiting
    adapter   how long the adapter's weights take to get there; dearer than the wait alone, since
              they push out those of others
    prompt    how long the engine computes the part of the prompt that its prefix cache lacks

So a cold adapter stays on one engine, where residency draws its requests, until that engine is more
crowded than another load is worth: then the adapter has two engines. All gateways decide alike from
the same facts; where facts make no difference, a hash of the adapter does, so that gateways that do
not know of each other's requests yet send one adapter to one engine.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

LOAD_PRICE = 2.0
"""Price of a second of loading in seconds of waiting: evicted adapters will be loaded again."""
FULL_BATCH = 0.5
"""How much longer a request takes in a full batch than alone, as a share of its time."""
INDIFFERENCE_S = 0.02
"""Differences between costs that are smaller are noise, and the hash decides."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine as one request sees it.

    num_requests: about how many requests run there, wait there or are on their way.
    seats: requests that run at once.   request_s: how long a request takes there lately.
    load_s: seconds until the request's adapter can be used, 0 if it can already.
    is_coming: whether that adapter is being loaded already.
    prefill_s: seconds to compute the part of the prompt that is not cached.
    """

    name: str
    num_requests: float
    seats: int
    request_s: float
    load_s: float = 0.0
    is_coming: bool = False
    prefill_s: float = 0.0


def route(views: Sequence[EngineView], key: str) -> EngineView:
    """The engine for a request.

    key: decides between equal costs. It is the adapter's, so that all its requests agree; requests
    on the base model have the key of their prompt's prefix.
    """
    costs = [cost_s(view) for view in views]
    limit = min(costs) + INDIFFERENCE_S
    equals = {view.name: view for view, cost in zip(views, costs, strict=True) if cost <= limit}
    return equals[home(list(equals), key)]


def cost_s(view: EngineView) -> float:
    """Cost of a first token in seconds, which may only be compared between engines."""
    load_s = view.load_s if view.is_coming else LOAD_PRICE * view.load_s
    return view.request_s * _crowd(view.num_requests / view.seats) + load_s + view.prefill_s


def home(names: Sequence[str], key: str) -> str:
    """The engine of highest rank for a key, by rendezvous hashing (Thaler 1998): when an engine
    comes or goes, only its own keys move.
    """
    if len(names) == 1:
        return names[0]
    return max(names, key=lambda n: hashlib.blake2b(f"{key}\n{n}".encode(), digest_size=8).digest())


def _crowd(fill: float) -> float:
    """Share of a request's time that a batch of this fill adds to it, and the queue behind it."""
    return FULL_BATCH * min(fill, 1.0) + max(fill - 1.0, 0.0)
