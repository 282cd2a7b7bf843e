"""The engine's core: messages in, steps, messages out. No sockets, threads or torch of its own."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace

from engine.journal.journal import Journal, JournalFull
from engine.leaving import refusal
from engine.proofs.proof import ProofRunner, Reference
from engine.requests.request import RequestGroup
from engine.scheduling.scheduler import Scheduler
from engine.steps.batch import Batch, StepResult, StepTokens
from engine.steps.runner import Runner
from engine.steps.times import PhaseSeconds, StepTimes, size_of
from engine.wire.messages import (
    NOT_METERED,
    PROOF_TENANT,
    PROVING,
    SILENCE_S,
    AbortRequests,
    AddRequest,
    EngineStats,
    ExtendLease,
    ForgetDrafts,
    LeaseLow,
    PinAdapters,
    Prefetch,
    ProofResult,
    ProveAdapter,
    ReadJournal,
    RequestOutput,
    Residency,
    StepOutputs,
    TenantService,
    TierStats,
)
from engine.wire.records import EndRecord, JournalRecords, ResidencyItem
from lora.beat import Beat
from lora.residency_meter import Stay

ToGateway = StepOutputs | LeaseLow | JournalRecords | ProofResult

Busy = Callable[[str, float], AbstractContextManager[None]]
"""Announces work that may take long, and how many seconds it may take; see lora.beat."""
_MOST_TENANTS = 10
"""Tenants whose seconds of grammars are in the figures: those with the most."""
_DISK_S = SILENCE_S
"""Longest time that a disk may hold up the loop. Gateways wait for as long without being told."""


class EngineCore:
    """One engine, without its process.

    max_unsettled: number of journal records waiting for the settler at which requests are refused.
    residency_interval_s: time between residency records.   reference, precision: see ProofRunner.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        journal: Journal,
        reference: Reference,
        precision: float = 0.005,
        max_unsettled: int = 100_000,
        residency_interval_s: float = 900.0,
    ) -> None:
        self.scheduler = scheduler
        self.adapters = scheduler.adapters
        self.runner = runner
        self.journal = journal
        self.max_unsettled = max_unsettled
        self.residency_interval_s = residency_interval_s
        self._residency_due = scheduler.clock() + residency_interval_s
        self._residency_since = journal.clock()
        self._is_finished = False
        self.proofs = ProofRunner(reference, scheduler, self._accept, precision, scheduler.clock)
        self._step_times = StepTimes()
        self._phases = PhaseSeconds(scheduler.clock)
        self.largest_batch = Batch(0, ())
        self.num_steps = self.num_completion_tokens = 0
        self.num_prompt_tokens = self.num_cached_tokens = 0

    def step(self, busy: Busy = Beat().busy) -> list[tuple[str, ToGateway]]:
        """Run one step of every request that can run; the returned messages may be sent at once."""
        phases = self._phases
        phases.begin()
        self.adapters.poll()
        batch = self.scheduler.schedule()
        phases.end("schedule")
        finished, tokens = self._compute(batch, busy)
        phases.end("compute")
        self.scheduler.update(finished, tokens)
        phases.end("update")
        if self.runner.lag:
            self._choose(batch)
            phases.end("choose")
        result = self.scheduler.outputs.take(finished.step)
        if result.num_forced:
            self.runner.meter.count(prompt_tokens=0, sampled_tokens=result.num_forced)
        if self.scheduler.clock() >= self._residency_due:
            self._note_residency()
        try:
            with busy("writing the journal", _DISK_S):
                self.journal.commit(result)
        except JournalFull as full:
            result = _fail_all(self.scheduler, result, full.ends)
        self.journal.make_room()
        phases.end("journal")
        answers = self._deliver(finished, result)
        phases.end("deliver")
        if self.proofs.has_work:
            with busy("proving an adapter", _DISK_S):
                answers += self.proofs.advance()
            phases.end("prove")
        return answers

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.proofs.has_work

    def _compute(self, batch: Batch, busy: Busy) -> tuple[Batch, StepTokens]:
        """Launch a step unless it is empty, and collect the oldest one if more than the lag
        are in flight or none was launched. Otherwise the result is an empty step.
        """
        launched = self.scheduler.in_flight.steps
        finished, tokens = Batch(0, ()), StepTokens(())
        sizes = {size_of(step.batch) for step in launched}
        begun_at = self.scheduler.clock()
        with busy("computing a step", self._step_times.limit_s(sizes)):
            if not batch.is_empty:
                self.runner.launch(batch)
            if not self.runner.lag:
                self._choose(batch)
            most_in_flight = 0 if batch.is_empty else self.runner.lag
            if len(launched) > most_in_flight:
                finished, tokens = launched[0].batch, self.runner.collect()
        self._step_times.note(sizes, self.scheduler.clock() - begun_at)
        return finished, tokens

    def _choose(self, batch: Batch) -> None:
        """Have the tokens of a constrained step chosen.

        The masks are those after the step before, whose tokens are known by now; lanes made them
        while this step ran.
        """
        if batch.is_constrained:
            self.runner.choose(self.scheduler.constrain())

    def handle(self, gateway_id: str, message: object) -> list[tuple[str, ToGateway]]:
        """Handle one message of a gateway, and return the immediate answers to it."""
        match message:
            case AddRequest():
                reason = PROVING if self.proofs.is_alone else self._accept(message, gateway_id)
                return [(gateway_id, refusal(message, reason))] if reason else []
            case AbortRequests():
                self.scheduler.abort(message.request_ids)
            case ExtendLease():
                self.scheduler.extend_lease(message)
            case Prefetch():
                self.adapters.prefetch(message.adapter, message.tenant_id)
            case PinAdapters():
                self.adapters.pin(message.adapters)
            case ProveAdapter():
                if refused := self.proofs.add(gateway_id, message):
                    return [(gateway_id, refused)]
            case ForgetDrafts():
                self.scheduler.forget_drafts(message.tenant_id, message.adapter_digest)
            case ReadJournal():
                return [(gateway_id, self.journal.answer(message))]
            case TenantService():
                if message.engine_id != self.journal.engine_id:
                    self.scheduler.policy.note_elsewhere(message)
        return []

    def abort_gateway(self, gateway_id: str) -> None:
        """End a gateway's requests, since nobody reads their outputs any more."""
        groups = self.scheduler.groups.values()
        lost = [group.request_id for group in groups if group.gateway_id == gateway_id]
        self.scheduler.abort(lost, "gateway_lost")

    def check_integrity(self) -> None:
        """Assert that all bookkeeping agrees, in time proportional to the number of blocks."""
        self.scheduler.check_integrity()

    def finish(self) -> None:
        """Write the last record, of residency, once no request is open. No record may follow it."""
        if self._is_finished or not self.journal.is_idle:
            return
        self._is_finished = True
        self._write_last()

    @property
    def is_settled(self) -> bool:
        """Whether the engine has finished, and all of its journal is posted."""
        return self._is_finished and self.journal.is_settled

    def close(self) -> None:
        """Close the journal after the last step, with the residency since its last record."""
        if not self._is_finished:
            self._write_last()
        self.journal.close()

    def _write_last(self) -> None:
        self._note_residency()
        with suppress(JournalFull):
            self.journal.commit(StepResult())

    def take_service(self, epoch: int) -> list[TenantService]:
        """Take the changed service totals, for other engines; a policy without totals gives none.

        epoch: number of this engine's start.
        """
        totals = self.scheduler.policy.take_service()
        if not totals:
            return []
        return [TenantService(engine_id=self.journal.engine_id, epoch=epoch, totals=totals)]

    def take_residency(self) -> list[Residency]:
        """Take the adapters that moved since the last call."""
        return self.adapters.machine.take_moves()

    def all_residency(self) -> list[Residency]:
        """Current tier of every adapter, for a gateway that has just connected."""
        return self.adapters.machine.locations()

    def take_stats(self) -> EngineStats:
        """Take the current figures; the search for the largest batch begins anew."""
        scheduler, batch = self.scheduler, self.largest_batch
        self.largest_batch = Batch(0, ())
        costs, lanes = scheduler.kv.swap.costs, scheduler.constraints.lanes
        return EngineStats(
            running=len(scheduler.queues.running),
            waiting=len(scheduler.queues.waiting),
            batch_requests=len(batch.rows),
            batch_tokens=batch.num_tokens,
            batch_adapters=len(batch.adapters),
            free_slabs=scheduler.arena.num_free + scheduler.speculation.num_slabs,
            total_slabs=scheduler.arena.num_slabs,
            adapter_slabs=self.adapters.machine.num_slabs,
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
            adapter_evictions=self.adapters.machine.num_evictions,
            pinned_slabs=self.adapters.num_slabs_pinned,
            unsettled_records=self.journal.num_unsettled,
            tiers=_tiers(scheduler),
            grammars=replace(lanes.figures, tenants=lanes.busiest(_MOST_TENANTS)),
            drafts=scheduler.speculation.figures(),
            step_seconds=self._phases.seconds,
        )

    def _accept(self, message: AddRequest, gateway_id: str = PROOF_TENANT) -> str | None:
        """Queue a request and journal it, or return the reason of its refusal in a word."""
        if not (self._can_meter and self.journal.has_place):
            return NOT_METERED
        reason = self.scheduler.add(gateway_id, message)
        if reason is None:
            self.journal.start(self.scheduler.groups[message.request_id])
        return reason

    @property
    def _can_meter(self) -> bool:
        return not self.journal.is_full and self.journal.num_unsettled < self.max_unsettled

    def _note_residency(self) -> None:
        """Hand the residency to the journal; while it takes nothing, the time adds up here."""
        if not self._can_meter:
            return
        self._residency_due = self.scheduler.clock() + self.residency_interval_s
        stays = self.adapters.machine.meter.take()
        items = [_item(stay, duration_ms) for stay, duration_ms in stays]
        self.journal.note_residency(self._residency_since, items)
        self._residency_since = self.journal.clock()

    def _deliver(self, batch: Batch, result: StepResult) -> list[tuple[str, ToGateway]]:
        if batch.rows:
            self.num_steps += 1
            self.largest_batch = max(self.largest_batch, batch, key=lambda b: len(b.rows))
        by_gateway: dict[str, list[RequestOutput]] = {}
        for gateway_id, output in result.outputs:
            if gateway_id == PROOF_TENANT:
                self.proofs.take(output)
                continue
            by_gateway.setdefault(gateway_id, []).append(output)
        self.num_completion_tokens += sum(len(p.new_token_ids) for p in result.progress)
        self.num_prompt_tokens += sum(g.num_prompt_tokens_done for g in result.ended)
        self.num_cached_tokens += sum(g.num_cached_tokens for g in result.ended)
        return [
            *((g, StepOutputs(outputs=tuple(outputs))) for g, outputs in by_gateway.items()),
            *result.leases_low,
        ]


def _fail_all(scheduler: Scheduler, result: StepResult, ends: Sequence[EndRecord]) -> StepResult:
    """Replace the result of a step that found the journal full: all requests end by `ends`."""
    groups = [*result.ended, *scheduler.groups.values()]
    num_sent = {group.request_id: group.num_outputs_sent for group in groups}
    for _, output in result.outputs:
        num_sent[output.request_id] -= 1
    scheduler.abort(list(scheduler.groups), "engine_failure")
    scheduler.outputs.take(result.step)  # drops the outputs of the abort
    by_id = {end.request_id: end for end in ends}
    failed = [
        (g.gateway_id, _failed(g, num_sent[g.request_id], by_id.get(g.request_id))) for g in groups
    ]
    return StepResult(result.step, failed)


def _failed(group: RequestGroup, seq: int, end: EndRecord | None) -> RequestOutput:
    """The one last output of a request that failed; without an end it was never accepted."""
    return RequestOutput(
        request_id=group.request_id,
        seq=seq,
        finish_reason="error",
        stop_cause=end.stop_cause if end else None,
        error=NOT_METERED,
        num_prompt_tokens=end.num_prompt_tokens if end else 0,
        num_cached_tokens=end.num_cached_tokens if end else 0,
        num_completion_tokens=end.num_completion_tokens if end else 0,
        adapter_digest=group.applied_digest,
        is_last=True,
    )


def _tiers(scheduler: Scheduler) -> tuple[TierStats, ...]:
    layout, adapters = scheduler.layout, scheduler.adapters
    counts = adapters.counts
    slab_bytes = layout.num_shards * layout.slab_bytes  # on all ranks together
    counts.device.used_bytes = adapters.machine.num_slabs * slab_bytes
    counts.device.limit_bytes = scheduler.arena.num_slabs * slab_bytes
    counts.host.used_bytes = adapters.machine.host.used_bytes
    return tuple(map(replace, (counts.device, counts.host, counts.disk, counts.store)))


def _item(stay: Stay, duration_ms: int) -> ResidencyItem:
    adapter = stay.adapter
    return ResidencyItem(
        object_key=adapter.object_key,
        adapter_id=adapter.adapter_id,
        version=adapter.version,
        digest=adapter.digest,
        tier=stay.tier,
        size_bytes=stay.size_bytes,
        slabs=stay.slabs,
        duration_ms=duration_ms,
        is_pinned=stay.is_pinned,
    )
