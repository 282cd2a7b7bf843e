"""Requests that engines died of: one that was in flight at two deaths is not tried a third time."""

import hashlib
import logging
from collections import OrderedDict

from engine.messages import AddRequest

logger = logging.getLogger(__name__)

_MAX_DEATHS = 2
_REMEMBERED_FINGERPRINTS = 10_000


class Quarantined(Exception):
    """An equal request was in flight at two engine deaths, so this one is not tried."""


class Quarantine:
    """Refuses requests whose fingerprint was in flight at two engine deaths.

    The latest 10,000 fingerprints are remembered.
    """

    def __init__(self) -> None:
        self._deaths: OrderedDict[str, int] = OrderedDict()

    @property
    def num_refused(self) -> int:
        """Fingerprints that are refused."""
        return sum(deaths >= _MAX_DEATHS for deaths in self._deaths.values())

    def check(self, mark: str) -> None:
        """Raise Quarantined if requests with this fingerprint were in flight at too many deaths."""
        if self._deaths.get(mark, 0) >= _MAX_DEATHS:
            raise Quarantined

    def note_death(self, mark: str) -> None:
        """Note that an engine died while it had this request."""
        deaths = self._deaths.pop(mark, 0) + 1
        self._deaths[mark] = deaths
        if deaths >= _MAX_DEATHS:
            logger.error("request fingerprint %s is quarantined", mark)
        if len(self._deaths) > _REMEMBERED_FINGERPRINTS:
            self._deaths.popitem(last=False)


def fingerprint(request: AddRequest) -> str:
    """A hash of the request's tenant, adapter, prompts, sampling parameters and grammar."""
    digest = request.adapter.digest if request.adapter else None
    shape = (request.tenant_id, digest, request.prompts, request.sampling_params, request.grammar)
    return hashlib.blake2b(repr(shape).encode(), digest_size=16).hexdigest()
