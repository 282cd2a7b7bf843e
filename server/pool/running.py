"""A base model's requests under way in this gateway: their tenants, and which wait to begin."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request between its admission and the end of its last answer.

    wanted_tokens: completion tokens that all its answers together may have.
    is_cold: its adapter had to be loaded first, so it waits for that and not for a turn.
    adapter: the name by which it asked for its adapter, or None.
    engine: name of the engine that has it.   begun: numbers of its answers with a first token.
    is_cancelled: its tenant asked to end it, maybe before the engine had it.
    """

    request_id: str
    tenant_id: str
    num_answers: int
    wanted_tokens: int
    is_cold: bool
    engine: str = ""
    adapter: str | None = None
    begun: set[int] = field(default_factory=set)
    is_cancelled: bool = False

    @property
    def has_begun(self) -> bool:
        return bool(self.begun)


@dataclass(slots=True, eq=False)
class Parent:
    """A request for a route, while it is not decided which of its attempts is the answer.

    is_cancelled: its tenant asked to end it, so that no other attempt begins.
    """

    tenant_id: str
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """Answers that a tenant has under way.

    num_running: those with a first token.   num_queued: those that wait for their turn.
    num_cold: those that wait for an adapter.
    """

    tenant_id: str
    num_running: int
    num_queued: int
    num_cold: int


class Running:
    """The requests under way by id, and counts of their answers."""

    def __init__(self) -> None:
        self._requests: dict[str, RunningRequest] = {}
        self._waiting: Counter[str] = Counter()
        self._queued: Counter[str] = Counter()
        self._answers: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._requests))

    @property
    def requests(self) -> list[RunningRequest]:
        return list(self._requests.values())

    @property
    def num_queued(self) -> int:
        """Answers of all tenants that wait for their turn, not for an adapter."""
        return self._queued.total()

    @property
    def queued(self) -> Mapping[str, int]:
        """Answers that wait for their turn, by tenant."""
        return self._queued

    @property
    def num_waiting_of_all(self) -> int:
        """Answers of all tenants without a first token, whatever they wait for."""
        return self._waiting.total()

    def by_tenant(self) -> list[TenantLoad]:
        """List what each tenant has under way, the one with most waiting answers first."""
        answers: Counter[str] = Counter()
        for request in self._requests.values():
            answers[request.tenant_id] += request.num_answers
        loads = [
            TenantLoad(
                tenant_id,
                number - self._waiting[tenant_id],
                self._queued[tenant_id],
                self._waiting[tenant_id] - self._queued[tenant_id],
            )
            for tenant_id, number in answers.items()
        ]
        return sorted(loads, key=lambda load: (-load.num_queued - load.num_cold, -load.num_running))

    def num_at(self, engine: str) -> int:
        """Answers that this engine has to give."""
        return self._answers[engine]

    def num_waiting(self, tenant_id: str) -> int:
        """A tenant's answers without a first token, whatever they wait for."""
        return self._waiting[tenant_id]

    def find(self, request_id: str) -> RunningRequest | None:
        return self._requests.get(request_id)

    def add(self, request: RunningRequest) -> None:
        self._requests[request.request_id] = request
        self._count_answers(request, 1)
        self._count_waiting(request, request.num_answers)

    def begin(self, request: RunningRequest, index: int) -> None:
        """Note the first token of one of its answers; a second call for it does nothing."""
        if index not in request.begun:
            request.begun.add(index)
            self._count_waiting(request, -1)

    def move(self, request: RunningRequest, engine: str) -> None:
        """Note that another engine has the request from now on."""
        self._count_answers(request, -1)
        request.engine = engine
        self._count_answers(request, 1)

    def remove(self, request: RunningRequest) -> None:
        """Forget a request that has ended or never began; a second call does nothing."""
        if self._requests.pop(request.request_id, None) is None:
            return
        self._count_answers(request, -1)
        self._count_waiting(request, len(request.begun) - request.num_answers)

    def _count_answers(self, request: RunningRequest, sign: int) -> None:
        self._answers[request.engine] += sign * request.num_answers
        if not self._answers[request.engine]:
            del self._answers[request.engine]

    def _count_waiting(self, request: RunningRequest, step: int) -> None:
        for counts in (self._waiting,) if request.is_cold else (self._waiting, self._queued):
            counts[request.tenant_id] += step
            if not counts[request.tenant_id]:
                del counts[request.tenant_id]
