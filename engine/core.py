"""The engine: messages in, steps, messages out. No sockets, no threads, no torch of its own."""

from dataclasses import asdict
from typing import Protocol

from engine.batch import Batch, StepResult, StepTokens
from engine.canary import Canary, Reference
from engine.journal import Journal
from engine.messages import (
    CANARY,
    AbortRequests,
    AddRequest,
    EngineStats,
    ExtendLease,
    JournalRecords,
    LeaseLow,
    PinAdapters,
    Prefetch,
    ProofResult,
    ProveAdapter,
    ReadJournal,
    RequestOutput,
    Residency,
    StepOutputs,
    TierStats,
)
from engine.scheduler import Scheduler
from lora.manager import Place

FromGateway = (
    AddRequest | AbortRequests | ExtendLease | Prefetch | PinAdapters | ProveAdapter | ReadJournal
)
ToGateway = StepOutputs | LeaseLow | JournalRecords | ProofResult


class Runner(Protocol):
    """Runs steps on the device, in the order in which they are launched.

    lag: steps that may run while the next one is being scheduled; 0 where `launch` computes.
    """

    lag: int

    def launch(self, batch: Batch) -> None:
        """Begin a step."""
        ...

    def collect(self) -> StepTokens:
        """What the oldest step came to, once it has finished."""
        ...


class EngineCore:
    """One engine. max_unsettled: end records that may wait for the settler; then nothing is
    accepted.   reference, precision: see Canary.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        journal: Journal,
        reference: Reference | None = None,
        precision: float = 0.005,
        max_unsettled: int = 100_000,
    ) -> None:
        self.scheduler = scheduler
        self.adapters = scheduler.adapters
        self.runner = runner
        self.journal = journal
        self.max_unsettled = max_unsettled
        self.canary = Canary(reference, scheduler, self._accept, precision, scheduler.clock)
        self.largest_batch = Batch(0, ())
        self.num_steps = self.num_completion_tokens = 0
        self.num_prompt_tokens = self.num_cached_tokens = 0

    def step(self) -> list[tuple[str, ToGateway]]:
        """One step of every request that can run; what comes back may be sent at once."""
        self.adapters.poll()
        batch = self.scheduler.schedule()
        if not batch.is_empty:
            self.runner.launch(batch)
        finished, tokens = self._collect(must_wait=batch.is_empty)
        result = self.scheduler.update(finished, tokens)
        return [*self._deliver(finished, self.journal.commit(result)), *self.canary.advance()]

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.canary.has_work

    def _collect(self, *, must_wait: bool) -> tuple[Batch, StepTokens]:
        """The oldest step and its tokens, once enough others run behind it or none is to come."""
        launched = self.scheduler.launched
        if not launched or (len(launched) <= self.runner.lag and not must_wait):
            return Batch(0, ()), StepTokens(())
        return launched[0].batch, self.runner.collect()

    def handle(self, gateway_id: str, message: FromGateway) -> list[tuple[str, ToGateway]]:
        """Take in one message; the answers, if it has any at once."""
        match message:
            case AddRequest():
                return self._add(gateway_id, message)
            case AbortRequests():
                self.scheduler.abort(message.request_ids)
            case ExtendLease():
                self.scheduler.extend_lease(message)
            case Prefetch():
                self.adapters.prefetch(message.adapter, message.tenant_id)
            case PinAdapters():
                self.adapters.pin(message.adapters)
            case ProveAdapter():
                if refused := self.canary.add(gateway_id, message):
                    return [(gateway_id, refused)]
            case ReadJournal():
                return [(gateway_id, self._read_journal(message))]
        return []

    def take_residency(self) -> list[Residency]:
        """Adapters that moved since the last call."""
        return [_residency(move) for move in self.adapters.take_moves()]

    def all_residency(self) -> list[Residency]:
        """Where every adapter is now, for a gateway that has just come."""
        return [_residency(place) for place in self.adapters.places()]

    def take_stats(self) -> EngineStats:
        """The figures of now; the largest batch is searched for anew."""
        scheduler, batch = self.scheduler, self.largest_batch
        self.largest_batch = Batch(0, ())
        costs = scheduler.kv.swap.costs
        return EngineStats(
            running=len(scheduler.queues.running),
            waiting=len(scheduler.queues.waiting),
            batch_requests=len(batch.rows),
            batch_tokens=batch.num_tokens,
            batch_adapters=len(batch.adapters),
            free_slabs=scheduler.arena.num_free,
            total_slabs=scheduler.arena.num_slabs,
            adapter_slabs=self.adapters.num_slabs_used,
            steps=self.num_steps,
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_completion_tokens,
            cached_tokens=self.num_cached_tokens,
            preemptions=scheduler.queues.num_preemptions,
            swapped=scheduler.queues.num_swaps,
            prefix_slabs=scheduler.kv.pool.num_idle,
            prefix_evictions=scheduler.kv.pool.num_evictions,
            prefill_tokens_per_s=costs.prefill_tokens_per_s,
            copy_bytes_per_s=costs.copy_bytes_per_s,
            adapter_evictions=self.adapters.num_evictions,
            pinned_slabs=self.adapters.num_slabs_pinned,
            unsettled_records=self.journal.num_unsettled,
            tiers=self._tiers(),
        )

    def _tiers(self) -> tuple[TierStats, ...]:
        slab_bytes, counts = self.scheduler.layout.slab_bytes, self.adapters.counts
        counts.device.used_bytes = self.adapters.num_slabs_used * slab_bytes
        counts.device.limit_bytes = self.scheduler.arena.num_slabs * slab_bytes
        counts.host.used_bytes = self.adapters.host_bytes
        return (
            TierStats(tier="device", **asdict(counts.device)),
            TierStats(tier="host", **asdict(counts.host)),
            TierStats(tier="disk", **asdict(counts.disk)),
            TierStats(tier="store", **asdict(counts.store)),
        )

    def _read_journal(self, message: ReadJournal) -> JournalRecords:
        if message.engine_id == self.journal.engine_id:
            return self.journal.read(message.settled_seq, message.limit)
        return JournalRecords(
            engine_id=self.journal.engine_id, records=(), last_seq=0, complete=False
        )

    def _add(self, gateway_id: str, message: AddRequest) -> list[tuple[str, ToGateway]]:
        if not (refusal := self._accept(message, gateway_id)):
            return []
        # Never accepted, so the journal knows nothing of it: the gateway voids the hold.
        refused = RequestOutput(
            request_id=message.request_id, seq=0, finish_reason="error", error=refusal, is_last=True
        )
        return [(gateway_id, StepOutputs(outputs=(refused,)))]

    def _accept(self, message: AddRequest, gateway_id: str = CANARY) -> str | None:
        """Queue a request and journal it; or say in a word why not."""
        if self.journal.num_unsettled >= self.max_unsettled:
            return "metering_unavailable"
        refusal = self.scheduler.add(gateway_id, message)
        if refusal is None:
            self.journal.start(self.scheduler.groups[message.request_id])
        return refusal

    def _deliver(self, batch: Batch, result: StepResult) -> list[tuple[str, ToGateway]]:
        if batch.rows:
            self.num_steps += 1
            self.largest_batch = max(self.largest_batch, batch, key=lambda b: len(b.rows))
        by_gateway: dict[str, list[RequestOutput]] = {}
        for gateway_id, output in result.outputs:
            if gateway_id == CANARY:
                self.canary.take(output)
                continue
            by_gateway.setdefault(gateway_id, []).append(output)
        self.num_completion_tokens += sum(len(p.new_token_ids) for p in result.progress)
        self.num_prompt_tokens += sum(g.num_prompt_tokens_done for g in result.ended)
        self.num_cached_tokens += sum(g.num_cached_tokens for g in result.ended)
        return [
            *((g, StepOutputs(outputs=tuple(outputs))) for g, outputs in by_gateway.items()),
            *result.leases_low,
        ]


def _residency(place: Place) -> Residency:
    adapter, tier, size_bytes, error = place
    return Residency(
        object_key=adapter.object_key,
        digest=adapter.digest,
        tier=tier,
        size_bytes=size_bytes,
        error=error,
    )
