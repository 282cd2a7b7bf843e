"""Requests that engines may have died of, from the first suspicion to its end.

An engine that dies takes everything with it that it served, and one of those requests may be the
cause. A request is known by its fingerprint, and a death by the start of the engine that ended.

    state     what is known since an equal request succeeded     an equal request
    clear     it was there at fewer than two deaths              is served like any other
    suspect   it was there at two deaths of different starts     is tried alone
    held      an engine died in its trial, which others joined   has to wait
    refused   an engine died in its trial, of it alone           is refused

An operator may clear it, and LIFETIME_S after its last death it is forgotten. A trial begins when
the engine serves nobody else. A base model has one at a time, and other requests go to other
engines meanwhile if there are some. So of one poisonous request, sent again and again, three
engines die within LIFETIME_S. An innocent one is refused only if its engine dies of something else
just while it is tried there alone. Each gateway sees its own requests only.
"""

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from engine.errors import EngineDied
from engine.wire.messages import AddRequest

logger = logging.getLogger(__name__)

LIFETIME_S = 600.0
"""How long after its last death a fingerprint is remembered."""
RETRY_S = 2.0
"""Seconds after which another suspect, or a busy engine, may be done."""
_MAX_DEATHS = 2
_REMEMBERED_FINGERPRINTS = 10_000


class Suspected(Exception):
    """A request is not served, as engines may have died of it.

    retry_after_s: None if it is refused until its fingerprint is forgotten.
    """

    def __init__(self, retry_after_s: float | None = None) -> None:
        super().__init__()
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class Suspect:
    """A fingerprint and what is known of it.

    deaths: starts of engines that died while they had it.   expires_at: Unix seconds.
    """

    fingerprint: str
    tenant_id: str
    deaths: set[str] = field(default_factory=set)
    state: Literal["clear", "suspect", "held", "refused"] = "clear"
    expires_at: float = 0.0


class Suspects:
    """The suspects of a base model.

    trial: the name of the engine where one is tried now.
    is_alone: whether it has been there alone since it began.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.trial: str | None = None
        self.is_alone = False
        self._clock = clock
        self._known: OrderedDict[str, Suspect] = OrderedDict()

    def all(self) -> list[Suspect]:
        """List the suspects that are not clear."""
        return [it for it in map(self._find, list(self._known)) if it.state != "clear"]

    def has(self, request: AddRequest) -> bool:
        """Whether a request is not served like any other."""
        while self._known and next(iter(self._known.values())).expires_at <= self._clock():
            self._known.popitem(last=False)
        return bool(self._known) and self._find(fingerprint(request)).state != "clear"

    def clear(self, mark: str) -> None:
        """Forget a fingerprint, if it is known."""
        self._known.pop(mark, None)

    @contextmanager
    def watch(self, mark: str, tenant_id: str, engine: str) -> Iterator[bool]:
        """Watch a request at an engine; yields whether it is on trial. Raises Suspected."""
        suspect = self._find(mark, tenant_id)
        is_tried = suspect.state != "clear"
        if suspect.state == "refused":
            raise Suspected
        if suspect.state == "held":
            raise Suspected(suspect.expires_at - self._clock())
        if is_tried:
            if self.trial:
                raise Suspected(RETRY_S)
            self.trial = engine
        if self.trial == engine:
            self.is_alone = False
        try:
            yield is_tried
        except EngineDied as died:
            self._note_death(mark, tenant_id, died.start, is_tried)
            raise
        finally:
            if is_tried:
                self.trial = None

    def _note_death(self, mark: str, tenant_id: str, start: str, is_tried: bool) -> None:
        suspect = self._known[mark] = self._find(mark, tenant_id)
        self._known.move_to_end(mark)
        suspect.deaths.add(start)
        suspect.expires_at = self._clock() + LIFETIME_S
        if is_tried:
            suspect.state = "refused" if self.is_alone else "held"
        elif suspect.state == "clear" and len(suspect.deaths) >= _MAX_DEATHS:
            suspect.state = "suspect"
        if suspect.state != "clear":
            logger.error("request fingerprint %s of %s: %s", mark, tenant_id, suspect.state)
        if len(self._known) > _REMEMBERED_FINGERPRINTS:
            self._known.popitem(last=False)

    def _find(self, mark: str, tenant_id: str = "") -> Suspect:
        found = self._known.get(mark)
        return found if found and found.expires_at > self._clock() else Suspect(mark, tenant_id)


def fingerprint(request: AddRequest) -> str:
    """A hash of the request's tenant, adapter, prompts, sampling parameters and grammar."""
    digest = request.adapter.digest if request.adapter else None
    asked = (request.tenant_id, digest, request.prompts, request.sampling_params, request.grammar)
    return hashlib.blake2b(repr(asked).encode(), digest_size=16).hexdigest()
