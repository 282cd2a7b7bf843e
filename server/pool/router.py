"""Which engine a request goes to: the one where its first token costs least, in seconds.

    crowd     how much those that are there already slow it down, or keep it waiting
    adapter   how long its weights take to get there; dearer than the wait alone, since they push
              out others'
    prompt    what the engine has to compute of it, less what its prefix cache has

So a cold adapter stays on one engine, where residency draws its requests, until that engine is more
crowded than another load is worth: then it has two. Whoever routes decides alike from the same
facts; where facts make no difference, a hash of the adapter does, so that gateways that do not know
of each other's requests yet send one adapter to one engine.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

LOAD_PRICE = 2.0
"""Of a second of loading, in seconds of waiting: what is evicted for it will be loaded again."""
FULL_BATCH = 0.5
"""How much longer a request takes in a full batch than alone, as a share of what it takes."""
INDIFFERENCE_S = 0.02
"""Differences below it are noise, and the hash decides."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """What is known of an engine, for one request.

    num_requests: about how many run, wait and are on their way there.   seats: that run at
    once.   request_s: what a request takes there lately.   load_s: until its adapter can be used,
    0 where it is.   is_coming: others wait for it there already.   prefill_s: of what is not
    cached of its prompt.
    """

    name: str
    num_requests: float
    seats: int
    request_s: float
    load_s: float = 0.0
    is_coming: bool = False
    prefill_s: float = 0.0


def choose(key: str, views: Sequence[EngineView]) -> EngineView:
    """key: the adapter's, so that its requests agree where nothing else decides; of requests on the
    base model, that of their prompts' beginning.
    """
    costs = [cost_s(view) for view in views]
    limit = min(costs) + INDIFFERENCE_S
    equals = [view for view, cost in zip(views, costs, strict=True) if cost <= limit]
    return equals[0] if len(equals) == 1 else max(equals, key=lambda view: rank(key, view.name))


def cost_s(view: EngineView) -> float:
    """Seconds, comparable between engines only."""
    load_s = view.load_s if view.is_coming else LOAD_PRICE * view.load_s
    return view.request_s * _crowd(view.num_requests / view.seats) + load_s + view.prefill_s


def rank(key: str, name: str) -> bytes:
    """Of an engine for a key: the highest is its home (rendezvous hashing, Thaler 1998), and when
    an engine comes or goes, only its own keys move.
    """
    return hashlib.blake2b(f"{key}\n{name}".encode(), digest_size=8).digest()


def _crowd(fill: float) -> float:
    """Of a request's time: what a batch so full adds to it, and what the queue does."""
    return FULL_BATCH * min(fill, 1.0) + max(fill - 1.0, 0.0)
