"""Drafts by a small model with the same vocabulary, whose KV lies in slabs that nobody needs.

The model has no adapters, and reads the tokens of an answer before it drafts for it:

    [0, num_computed)            in its KV
    [num_computed, + ahead)      drafts in its KV, which count as far as the answer came to say them
    [.., num_tokens)             unread: in its KV before it drafts, a part in each step
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.drafts.ngrams import BY_MODEL, Draft
from engine.requests.request import Request
from engine.steps.batch import ScheduledRow
from engine.steps.curve import StepCurve
from engine.wire.messages import SamplingParams
from lora.arena import Arena
from lora.eviction import Key

MOST_CATCH_UP = 64
"""Tokens that the model reads in a step beside the last one of each answer."""
_MOST_UNREAD = 16
"""Tokens to read for each token that an answer may still have: more are not worth reading."""
_OWNER = "drafts"
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class DraftModel(Protocol):
    """A model that drafts.   block_size: tokens whose KV one slab holds.   curve: of its steps."""

    block_size: int
    curve: StepCurve

    def next_tokens(self, rows: Sequence[ScheduledRow]) -> Sequence[int]:
        """Compute the rows; the likeliest next token of each row that samples, in their order."""
        ...


@dataclass(slots=True)
class _Kv:
    """The model's KV of one answer. See the module.   slabs: by position."""

    slabs: list[int] = field(default_factory=list)
    num_computed: int = 0
    ahead: tuple[int, ...] = ()

    def read_drafts(self, request: Request) -> None:
        """Count the drafts that the answer came to say; the others' KV is overwritten."""
        said = request.tokens(self.num_computed, request.num_tokens)
        for token_id, drafted in zip(said, self.ahead, strict=False):
            if token_id != drafted:
                break
            self.num_computed += 1
        self.ahead = ()


class ModelDrafter:
    """Drafts of a model for all answers of a step at once, one token of each after the other.

    Its slabs were free before, and are spare: the arena evicts them before all idle items. It reads
    and writes them only while a step is scheduled, when no other step runs.
    max_model_len: positions that the model has.   idle_share: share of the arena that it may have
    from idle items, as prefixes fill the arena in time; 0 for free slabs only.
    """

    def __init__(
        self, model: DraftModel, arena: Arena, max_model_len: int, idle_share: float = 0.0
    ) -> None:
        self._model = model
        self._arena = arena
        self._max_model_len = max_model_len
        self._most_from_idle = int(idle_share * arena.num_slabs)
        self._kvs: dict[Request, _Kv] = {}
        self._owners: dict[int, Request] = {}

    @property
    def num_slabs(self) -> int:
        return len(self._owners)

    def candidates(self, requests: Sequence[Request], most: int) -> list[Request]:
        """The answers that the model could draft `most` tokens for, soon if not now."""
        num_kept_free = len(requests)
        return [
            r for r in requests if self._is_worth_reading(r, r.num_tokens + most, num_kept_free)
        ]

    def seconds(self, requests: Sequence[Request], most: int) -> float:
        """Time of drafting `most` tokens for answers that the model has read but for the last."""
        curve = self._model.curve
        num_keys = sum(request.num_tokens for request in requests)
        return most * (curve.seconds(len(requests)) + curve.key_s * num_keys)

    def drafts(self, requests: Sequence[Request], most: int) -> Mapping[Request, Draft]:
        """Drafts for the answers whose tokens the model has read after this step.

        requests: the first ones are read first. See engine.drafts.speculation.Drafter.
        """
        rows, ready = self._rows_to_read(requests, most)
        if not rows:
            return {}
        drafted = {r: [t] for r, t in zip(ready, self._model.next_tokens(rows), strict=True)}
        if not ready:
            return {}  # it has read parts of answers only
        for place in range(most - 1):
            rows = [self._row(r, r.num_tokens + place, drafted[r][-1:]) for r in ready]
            for request, token_id in zip(ready, self._model.next_tokens(rows), strict=True):
                drafted[request].append(token_id)
        for request, token_ids in drafted.items():
            self._kvs[request].ahead = tuple(token_ids[:-1])
        return {request: Draft(tuple(ids), BY_MODEL) for request, ids in drafted.items()}

    def keep_only(self, running: Mapping[Request, object]) -> None:
        """Give back the slabs of answers that do not run, as they were preempted."""
        for request in [request for request in self._kvs if request not in running]:
            self.end(request)

    def end(self, request: Request) -> None:
        """See engine.drafts.speculation.Drafter."""
        if (kv := self._kvs.pop(request, None)) is not None:
            for slab in kv.slabs:
                self._arena.idle.take_spare(slab)
                del self._owners[slab]
            self._arena.retire(kv.slabs)

    def evict(self, key: Key) -> None:
        """Give back a slab; see lora.eviction.Source. The newest goes first: a request's last."""
        assert isinstance(key, int)
        kv = self._kvs[self._owners.pop(key)]
        assert kv.slabs[-1] == key, "not the request's last slab"
        kv.slabs.pop()
        most = len(kv.slabs) * self._model.block_size
        if kv.num_computed + len(kv.ahead) > most:
            kv.num_computed, kv.ahead = min(kv.num_computed, most), ()
        self._arena.retire([key])

    def check_integrity(self) -> None:
        """Assert that every slab is the arena's to take, and that KV lies in slabs."""
        assert self._arena.owned_by(_OWNER) == len(self._owners)
        assert all(slab in self._arena.idle for slab in self._owners)
        slabs = {slab: request for request, kv in self._kvs.items() for slab in kv.slabs}
        assert slabs == self._owners
        for request, kv in self._kvs.items():
            num_tokens = kv.num_computed + len(kv.ahead)
            assert num_tokens <= len(kv.slabs) * self._model.block_size
            assert kv.num_computed <= request.num_tokens

    def _is_worth_reading(self, request: Request, num_tokens: int, num_kept_free: int) -> bool:
        kv = self._kvs.get(request) or _Kv()
        num_left = request.max_tokens - len(request.output_token_ids)
        num_unread = request.num_tokens - kv.num_computed
        if num_left <= 1 or num_unread > _MOST_UNREAD * num_left:
            return False
        if num_tokens > self._max_model_len:
            return False
        num_missing = self._num_missing(kv, num_tokens)
        num_usable = self._arena.num_free
        if self._may_evict(num_missing):
            num_usable = self._arena.num_available - self._arena.idle.num_spare
        return not num_missing or num_missing + num_kept_free <= num_usable

    def _rows_to_read(
        self, requests: Sequence[Request], most: int
    ) -> tuple[list[ScheduledRow], list[Request]]:
        """Rows of the tokens that are to be read, and the answers that all was read of then."""
        rows: list[ScheduledRow] = []
        ready: list[Request] = []
        num_left = MOST_CATCH_UP
        num_kept_free = len(requests)  # for the drafts that the step verifies
        if self._most_from_idle:
            self._arena.make_room(num_kept_free, spares=False)
        for request in requests:
            kv = self._kvs.setdefault(request, _Kv())
            kv.read_drafts(request)
            start = min(kv.num_computed, request.num_tokens - 1)
            num_before_last = request.num_tokens - 1 - start
            is_ready = num_before_last <= num_left
            end = request.num_tokens if is_ready else start + num_left
            if start == end or not self._grow(request, request.num_tokens + most, num_kept_free):
                continue
            num_left -= min(num_before_last, num_left)
            token_ids = request.tokens(start, end)
            rows.append(self._row(request, start, token_ids, samples=is_ready))
            kv.num_computed = end
            if is_ready:
                ready.append(request)
        return rows, ready

    def _grow(self, request: Request, num_tokens: int, num_kept_free: int) -> bool:
        """Take slabs for the KV of so many tokens, if then as many stay free as are to be kept."""
        kv = self._kvs[request]
        num_missing = self._num_missing(kv, num_tokens)
        if num_missing and num_missing + num_kept_free > self._arena.num_free:
            may_evict, needed = self._may_evict(num_missing), num_missing + num_kept_free
            if not may_evict or not self._arena.make_room(needed, spares=False):
                return False
        for slab in self._arena.allocate(num_missing, _OWNER):
            kv.slabs.append(slab)
            self._owners[slab] = request
            self._arena.idle.add_spare(self, slab)
        return True

    def _may_evict(self, num_slabs: int) -> bool:
        """Whether idle items may make room for so many slabs more."""
        return len(self._owners) + num_slabs <= self._most_from_idle

    def _num_missing(self, kv: _Kv, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self._model.block_size) - len(kv.slabs))

    def _row(
        self, request: Request, start: int, token_ids: Sequence[int], *, samples: bool = True
    ) -> ScheduledRow:
        return ScheduledRow(
            request_id=request.request_id,
            index=request.index,
            token_ids=tuple(token_ids),
            start=start,
            block_ids=tuple(self._kvs[request].slabs),
            sampling=_GREEDY if samples else None,
        )
