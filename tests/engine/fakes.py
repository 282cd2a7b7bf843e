"""Fakes of engine parts (a runner without a model, a loader without files), and factories."""

import hashlib
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.drafts.ngrams import Draft
from engine.drafts.speculation import Drafter, Speculation
from engine.grammar.matcher import ConstraintFailed, mask_bytes
from engine.journal.journal import Journal
from engine.kv.swap import PreemptionCosts, SwapSpace
from engine.proofs.proof import Compared
from engine.requests.request import PENDING_TOKEN, Request
from engine.scheduling.scheduler import Scheduler
from engine.steps.batch import Batch, ScheduledRow, StepResult, StepTokens
from engine.steps.curve import StepCurve
from engine.steps.meter import TokenMeter
from engine.wire.messages import (
    AddRequest,
    RequestOutput,
    SamplingParams,
    StepOutputs,
    TokenLogprobs,
)
from lora.arena import Arena
from lora.errors import Failure
from lora.layout import Layout, ModelShape
from lora.loads import Fetched, Loaded, Placed, Read
from lora.manager import AdapterManager
from registry.ref import AdapterRef

if TYPE_CHECKING:
    # This module imports torch, which would cost every process of a fake engine 2 s.
    from lora.host_region import HostRegion

EOS = 0
VOCABULARY = [b"", *(bytes([b]) for b in range(1, 256))]
SHAPE = ModelShape(
    num_layers=2, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16
)
LAYOUT = Layout.of(SHAPE, itemsize=4)
TIERS = {Fetched: "disk", Read: "host", Placed: "device"}
"""Tier that an adapter has reached, by the type of the loader's report."""


class FakeClock:
    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def fake_token(history: Sequence[int], adapter_digest: str | None, adapter_start: int = 0) -> int:
    """A token derived from everything that a model's next token depends on; never EOS.

    adapter_start: the position from which on the adapter applies.
    """
    seed = f"{adapter_digest} {adapter_start} {list(history)}".encode()
    return hashlib.blake2b(seed).digest()[0] % 250 + 1


def fake_logprobs(
    history: Sequence[int], adapter_digest: str | None, adapter_start: int = 0
) -> np.ndarray:
    """Logprobs of 256 tokens, [256] float32, derived from the same arguments as fake_token."""
    seed = f"{adapter_digest} {adapter_start} {list(history)}".encode()
    numbers = np.frombuffer(hashlib.blake2b(seed).digest() * 4, np.uint8).astype(np.float32)
    logits = numbers / 64 + np.arange(256, dtype=np.float32) / 256
    return logits - np.log(np.exp(logits).sum())


def fake_told(
    token: int, most: int, history: Sequence[int], adapter_digest: str | None, adapter_start: int
) -> TokenLogprobs:
    """A token's logprob after this history, and the `most` top ones, by fake_logprobs."""
    logprobs = fake_logprobs(history, adapter_digest, adapter_start)
    top = tuple((int(t), float(logprobs[t])) for t in np.argsort(-logprobs)[:most])
    return TokenLogprobs(logprob=float(logprobs[token]), top=top)


class FakeReference:
    """The logprobs of FakeRunner with the adapter in a file, as a reference of engine.proofs.proof.

    invocation: invocation tokens of every adapter.
    merges: digest to use in place of the file's; None is the base model.
    rounding: what rounding the base model adds to logprobs, in nats; None if it is not rounded.
    """

    vocab_size = 256

    def __init__(self) -> None:
        self.invocation: tuple[int, ...] | None = None
        self.merges: str | None = "the file's"
        self.num_units = 3
        self.rounding: float | None = None

    def own_tokens(self, object_path: Path) -> tuple[tuple[int, ...] | None, Sequence[int]]:
        return self.invocation, ()

    def compare(self, sequences, object_path):
        digest = self.merges
        if digest == "the file's":
            digest = hashlib.sha256(object_path.read_bytes()).hexdigest()
        for _ in range(self.num_units):
            yield
        base, merged = [], []
        for sequence in sequences:
            length = len(sequence.token_ids)
            for end in range(1, length + 1):
                history = sequence.token_ids[:end]
                base.append(fake_logprobs(history, None))
                start = sequence.adapter_start if digest else 0
                merged.append(fake_logprobs(history, digest, start))
        whole = None if self.rounding is None else np.stack(merged) - self.rounding
        return Compared(np.stack(base), np.stack(merged), whole)


@dataclass
class FakeMatcher:
    """A grammar derived from its text and the tokens so far: now one token may follow, now four,
    now all but EOS. Some masks of a text that begins with "slow" take a while.
    """

    text: str
    vocab_size: int = 256
    so_far: tuple[int, ...] = ()

    def fork(self) -> "FakeMatcher":
        return replace(self)

    def consume(self, token_ids: Sequence[int]) -> None:
        self.so_far += tuple(token_ids)

    def mask(self) -> np.ndarray:
        digest = hashlib.blake2b(f"{self.text} {self.so_far}".encode()).digest()
        if self.text.startswith("slow") and digest[5] < 12:
            time.sleep(digest[6] / 1e5)
        kind = digest[0] % 4
        bits = np.zeros(8 * mask_bytes(self.vocab_size), dtype=np.uint8)
        most = min(250, self.vocab_size - 1)
        bits[[1 + b % most for b in digest[1 : 2 if kind < 2 else 5]]] = 1
        if kind == 3:
            bits[1 : self.vocab_size] = 1
        return np.packbits(bits, bitorder="little")


@dataclass
class FakeGrammars:
    vocab_size: int = 256

    def compile(self, text: str) -> FakeMatcher:
        if text == "bomb":
            raise ConstraintFailed("it is too large")
        return FakeMatcher(text, self.vocab_size)


def allowed_token(mask: np.ndarray, wanted: int) -> int:
    """The first token that the mask allows from `wanted` on, cyclically."""
    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
    return int(allowed[np.searchsorted(allowed, wanted) % len(allowed)])


def unbanned_token(banned: Sequence[int], wanted: int) -> int:
    """The first token that is not banned from `wanted` on, cyclically."""
    return next(token % 256 for token in range(wanted, wanted + 256) if token % 256 not in banned)


class FakeDrafter:
    """Drafts the tokens that FakeRunner will choose, but is wrong in `share_wrong` of them.

    window: as in FakeRunner.   is_brief: whether it drafts any number of tokens, not the most.
    """

    def __init__(
        self,
        seed: int = 0,
        share_wrong: float = 0.3,
        window: int | None = None,
        is_brief: bool = True,
    ) -> None:
        self._chance = random.Random(seed)
        self._share_wrong = share_wrong
        self._is_brief = is_brief
        self._window = window
        self.drafting: set[Request] = set()

    def drafts(self, requests: Sequence[Request], most: int) -> Mapping[Request, Draft]:
        return {request: self._draft(request, most) for request in requests}

    def _draft(self, request: Request, most: int) -> Draft:
        self.drafting.add(request)
        start = request.adapter_start if request.adapter else 0
        matcher = FakeMatcher(request.message.grammar)
        matcher.consume(request.output_token_ids)
        history = list(request.tokens(0, request.num_tokens))
        drafts = []
        for _ in range(self._chance.randint(0, most) if self._is_brief else most):
            seen = history[-(self._window or len(history)) :]
            token = fake_token(seen, request.group.digest, start)
            if request.message.grammar:
                token = allowed_token(matcher.mask(), token)
                matcher.consume([token])
            history.append(token)
            is_wrong = self._chance.random() < self._share_wrong
            drafts.append(1 + token % 250 if is_wrong else token)
        return Draft(tuple(drafts), 32)

    def end(self, request: Request) -> None:
        self.drafting.discard(request)


FLAT = StepCurve(((1, 1.0), (2, 1.0)))
"""Steps that all take as long, so that any draft is worth its while."""


class FakeRunner:
    """Chooses tokens, as a model does, from the contents of the blocks that it is given.

    The runner has a memory of its own, (slab, offset) -> (token, digest), and computes a step only
    when it is collected, so it sees the state that a device sees which is `lag` steps behind.
    """

    copy_bytes_per_s = 1e9

    def __init__(
        self, meter: TokenMeter | None = None, lag: int = 0, window: int | None = None
    ) -> None:
        self.meter = meter
        self.lag = lag
        self.window = window
        self.slabs: dict[int, dict[int, tuple[int, str | None]]] = {}
        self.swapped: dict[int, dict[int, tuple[int, str | None]]] = {}
        self.num_transfers = 0
        self.newest = Batch(0, ())
        self._launched: deque[Batch] = deque()
        self._choices: dict[int, Mapping[int, Sequence[np.ndarray]]] = {}
        self._chosen: dict[tuple[str, int], int] = {}
        self._named: dict[int, list[TokenLogprobs]] = {}
        self._accepted: dict[int, int] = {}
        self._scored: dict[int, list[TokenLogprobs]] = {}

    def launch(self, batch: Batch) -> None:
        self._launched.append(batch)
        self.newest = batch

    def choose(self, masks: Mapping[int, Sequence[np.ndarray]]) -> None:
        assert self.newest.is_constrained, "the step has chosen already"
        assert self.newest is self._launched[-1], "the step is gone"
        self._choices[self.newest.step] = masks

    def collect(self) -> StepTokens:
        batch = self._launched.popleft()
        assert not batch.is_constrained or batch.step in self._choices, "it has not chosen yet"
        self._masks = self._choices.pop(batch.step, {})
        written = {target for _, target in batch.copies} - {source for source, _ in batch.copies}
        assert len(written) == len(batch.copies), "copies depend on their order"
        for source, target in batch.copies:
            self.slabs[target] = dict(self.slabs[source])
        for transfer in batch.transfers:
            self.num_transfers += 1
            if transfer.is_out:
                self.swapped[transfer.slot] = dict(self.slabs.get(transfer.block_id, {}))
            else:
                self.slabs[transfer.block_id] = dict(self.swapped[transfer.slot])
        self._named.clear()
        self._accepted.clear()
        self._scored.clear()
        tokens = [self._compute(number, row) for number, row in enumerate(batch.rows)]
        if self.meter:
            prompt = sum(len(row.token_ids) for row in batch.rows if row.num_output_tokens == 0)
            num_chosen = sum(token is not None for token in tokens)
            self.meter.count(prompt, num_chosen + sum(self._accepted.values()))
        applied = {
            number: row.adapter_digest
            for number, row in enumerate(batch.rows)
            if row.adapter_digest and row.adapter_start < row.start + len(row.token_ids)
        }
        return StepTokens(
            tokens, dict(self._named), applied, dict(self._scored), dict(self._accepted)
        )

    def run(self, batch: Batch) -> StepTokens:
        """Run a step without lag."""
        self.launch(batch)
        return self.collect()

    def overwrite(self, slabs: Sequence[int]) -> None:
        """Delete these slabs' KV at once, as an adapter's tiles do, even while a step runs."""
        for slab in slabs:
            self.slabs[slab] = {}

    def _compute(self, number: int, row: ScheduledRow) -> int | None:
        answer = (row.request_id, row.index)
        for position, token in enumerate(row.token_ids, row.start):
            known = self._chosen[answer] if token == PENDING_TOKEN else token
            slab, offset = self._place(row, position)
            self.slabs.setdefault(slab, {})[offset] = (known, self._digest_at(row, position))
        adapter = row.adapter_digest, row.adapter_start if row.adapter_digest else 0
        if (scoring := row.scoring) is not None:
            self._scored[number] = [
                fake_told(token, scoring.num_top, self._history(row, end), *adapter)
                for end, token in enumerate(scoring.token_ids, row.start + scoring.first + 1)
            ]
        if row.sampling is None or (row.is_constrained and number not in self._masks):
            return None
        for place, draft in enumerate((*row.draft_token_ids, None)):
            history = self._history(row, row.end - row.num_drafts + place)
            chosen = unbanned_token(row.banned_token_ids, fake_token(history, *adapter))
            if row.is_constrained:
                chosen = allowed_token(self._masks[number][place], chosen)
            if (most := row.sampling.logprobs) is not None:
                told = fake_told(chosen, most, history, *adapter)
                self._named.setdefault(number, []).append(told)
            has_next = not row.is_constrained or place + 1 < len(self._masks[number])
            if chosen != draft or not has_next:
                break
            self._accepted[number] = place + 1
        self._chosen[answer] = chosen
        return chosen

    def _history(self, row: ScheduledRow, end: int) -> list[int]:
        """The tokens before position `end` in the row's blocks, at most a window of them."""
        history = []
        for position in range(max(0, end - (self.window or end)), end):
            slab, offset = self._place(row, position)
            token, digest = self.slabs[slab][offset]
            assert digest == self._digest_at(row, position), "the KV is of another adapter"
            history.append(token)
        return history

    @staticmethod
    def _digest_at(row: ScheduledRow, position: int) -> str | None:
        return row.adapter_digest if position >= row.adapter_start else None

    @staticmethod
    def _place(row: ScheduledRow, position: int) -> tuple[int, int]:
        return row.block_ids[position // LAYOUT.block_size], position % LAYOUT.block_size


@dataclass
class FakePacked:
    digest: str
    num_slabs: int
    size_bytes: int
    invocation_tokens: tuple[int, ...] | None = None
    region_slabs: tuple[int, ...] = ()

    @property
    def host_bytes(self) -> int:
        return self.size_bytes


class FakeLoader:
    """A loader whose stages end by the next poll, or when `finish` is called.

    slabs: number of slabs of an adapter, by object key.
    failures: by (object key, tier that the adapter fails to reach).
    invocation_tokens: of activated LoRAs, by object key.
    is_on_disk: whether fetches find their adapters on disk.
    region: host memory in which adapters that were read take slabs.
    """

    region: "HostRegion | None" = None

    def __init__(self, *, at_once: bool = True) -> None:
        self.at_once = at_once
        self.slabs: dict[str, int] = {}
        self.failures: dict[tuple[str, str], Failure] = {}
        self.invocation_tokens: dict[str, tuple[int, ...]] = {}
        self.under_way: list[Loaded[object]] = []
        self.done: list[Loaded[object]] = []
        self.fetched: list[str] = []  # object keys
        self.is_on_disk = False
        self.on_place: Callable[[Sequence[int]], None] = lambda slabs: None

    def fetch(self, ref: AdapterRef) -> None:
        self.fetched.append(ref.object_key)
        self._begin(Fetched(ref.object_key, host_bytes=ref.size_bytes, was_there=self.is_on_disk))

    def drop(self, key: str) -> None:
        """End the adapter's fetch that is under way with a failure."""
        for number, loaded in enumerate(self.under_way):
            if loaded.key == key and isinstance(loaded, Fetched):
                dropped = Failure("dropped", "nobody waits for it")
                self.under_way[number] = Fetched(key, dropped)

    def load(self, ref: AdapterRef) -> None:
        key = ref.object_key
        packed = FakePacked(
            ref.digest, self.slabs.get(key, 1), ref.size_bytes, self.invocation_tokens.get(key)
        )
        if self.region is not None and (key, "host") not in self.failures:
            taken = self.region.take(packed.num_slabs)
            assert taken is not None, "the region has no slabs for the adapter"
            packed = replace(packed, region_slabs=taken)
        self._begin(Read(ref.object_key, packed))

    def place(self, ref: AdapterRef, packed: FakePacked, slabs: list[int]) -> None:
        assert len(slabs) == packed.num_slabs
        self.on_place(slabs)
        self._begin(Placed(ref.object_key, f"tables of {ref.digest}"))

    def release(self, packed: FakePacked) -> None:
        if self.region is not None:
            self.region.give_back(packed.region_slabs)

    def finish(self, count: int = 1) -> None:
        self.done += self.under_way[:count]
        del self.under_way[:count]

    def poll(self) -> list[Loaded[object]]:
        done, self.done = self.done, []
        return done

    def _begin(self, loaded: Loaded[object]) -> None:
        loaded = replace(loaded, seconds=1e-3, size_bytes=1000)
        if failure := self.failures.get((loaded.key, TIERS[type(loaded)])):
            loaded = type(loaded)(loaded.key, failure)
        (self.done if self.at_once else self.under_way).append(loaded)


def make_adapter(name: str = "a", rank: int = 8, tenant_id: str = "t") -> AdapterRef:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return AdapterRef(name, 1, digest, f"tenants/{tenant_id}/{digest}", rank, size_bytes=1000)


def make_message(
    request_id: str = "r1",
    prompt_len: int = 9,
    max_tokens: int = 8,
    adapter: AdapterRef | None = None,
    tenant_id: str = "t1",
    token_lease: int | None = None,
    n: int = 1,
    prompt: Sequence[int] | None = None,
    **fields: object,
) -> AddRequest:
    """A request with these fields of AddRequest, or of its sampling parameters."""
    if prompt is None:
        prompt = (hashlib.blake2b(request_id.encode(), digest_size=32).digest() * 64)[:prompt_len]
    own = {
        name: fields.pop(name) for name in fields.keys() & AddRequest.__dataclass_fields__.keys()
    }
    return AddRequest(
        request_id=request_id,
        tenant_id=tenant_id,
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens, n=n, temperature=0.0, **fields),  # type: ignore[arg-type]
        token_lease=n * max_tokens if token_lease is None else token_lease,
        adapter=adapter,
        **{"deadline_s": 120.0, **own},  # type: ignore[arg-type]
    )


def make_scheduler(
    num_slabs: int = 64,
    loader: FakeLoader | None = None,
    clock: FakeClock | None = None,
    num_swap_slots: int = 0,
    drafter: Drafter | None = None,
    speculate: Callable[[Arena, int], Speculation] | None = None,
    **limits: object,
) -> Scheduler:
    """A scheduler whose drafts, if any, are the drafter's, or by what `speculate` makes of its
    arena and the longest request.
    """
    longest = min(256, num_slabs * LAYOUT.block_size)
    defaults = {"max_model_len": longest, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    clock = clock or FakeClock()
    arena = Arena(num_slabs)
    adapters = AdapterManager(arena, loader or FakeLoader(), clock=clock)
    config = SchedulerConfig(**{"scheduling_policy": "fcfs", **defaults, **limits})  # type: ignore[arg-type]
    costs = PreemptionCosts(FakeRunner.copy_bytes_per_s, clock)
    swap = SwapSpace(num_swap_slots, LAYOUT.slab_bytes, costs)
    speculation = Speculation(FLAT, drafter) if drafter else None
    if speculate:
        speculation = speculate(arena, config.max_model_len)
    words, grammars = VOCABULARY, FakeGrammars()
    return Scheduler(config, LAYOUT, adapters, words, [EOS], swap, clock, grammars, speculation)


def make_core(
    directory: Path,
    scheduler: Scheduler | None = None,
    lag: int = 0,
    journal: Journal | None = None,
    residency_interval_s: float = 900.0,
    **limits: object,
) -> EngineCore:
    """A core around a FakeRunner; adapters that the loader places overwrite the runner's KV."""
    journal = journal or Journal(directory / "journal", "eng-1", "base-1")
    scheduler = scheduler or make_scheduler(**limits)  # type: ignore[arg-type]
    window = scheduler.config.sliding_window
    runner = FakeRunner(TokenMeter(directory / "meter"), lag, window)
    loader = scheduler.adapters.loader
    assert isinstance(loader, FakeLoader)
    loader.on_place = runner.overwrite
    return EngineCore(
        scheduler, runner, journal, FakeReference(), residency_interval_s=residency_interval_s
    )


def tokens_for(batch: Batch) -> StepTokens:
    """The same token for every row that samples."""
    return StepTokens([7 if row.sampling else None for row in batch.rows])


def step(scheduler: Scheduler) -> Batch:
    """A step of the scheduler alone, whose samples are all the same token."""
    update(scheduler, batch := scheduler.schedule(), tokens_for(batch))
    return batch


def update(scheduler: Scheduler, batch: Batch, tokens: StepTokens) -> StepResult:
    """Have the scheduler take in a step; return what answers got."""
    scheduler.update(batch, tokens)
    return scheduler.outputs.take(batch.step)


def expected_tokens(
    message: AddRequest, window: int | None = None, invocation: Sequence[int] = ()
) -> list[int]:
    """Tokens that the request gets when it runs alone, without stops.

    invocation: the adapter's invocation tokens, if it is an activated LoRA; the prompt holds them.
    """
    history = list(message.prompt_token_ids)
    digest, start = adapter_of(message, invocation)
    matcher = FakeMatcher(message.grammar)
    for _ in range(message.sampling_params.max_tokens):
        token = fake_token(history[-(window or len(history)) :], digest, start)
        if message.grammar:
            token = allowed_token(matcher.mask(), token)
            matcher.consume([token])
        history.append(token)
    return history[len(message.prompt_token_ids) :]


def expected_prompt_logprobs(
    message: AddRequest, window: int | None = None, invocation: Sequence[int] = ()
) -> list[TokenLogprobs]:
    """Logprobs of the prompt from its second token on; the arguments are as in expected_tokens."""
    prompt, most = message.prompt_token_ids, message.sampling_params.prompt_logprobs
    if most is None:
        return []
    adapter = adapter_of(message, invocation)
    return [
        fake_told(prompt[end], most, prompt[max(0, end - (window or end)) : end], *adapter)
        for end in range(1, len(prompt))
    ]


def adapter_of(message: AddRequest, invocation: Sequence[int]) -> tuple[str | None, int]:
    """Digest of the request's adapter, and the position where the adapter starts."""
    prompt, length = message.prompt_token_ids, len(invocation)
    starts = [i for i in range(len(prompt)) if prompt[i : i + length] == tuple(invocation)]
    digest = message.adapter.digest if message.adapter else None
    return digest, starts[-1] if invocation else 0


def run_until_idle(
    core: EngineCore, max_steps: int = 2000, look: Callable[[], object] = lambda: None
) -> dict[str, list[RequestOutput]]:
    """Step until no work is left, checking integrity each time; return the outputs by request.

    look: called after each step.
    An answer waits in vain for a longer lease: the time passes at once.
    """
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(max_steps):
        if not core.scheduler.has_work:
            return outputs
        for _, message in core.step():
            if isinstance(message, StepOutputs):
                for output in message.outputs:
                    outputs.setdefault(output.request_id, []).append(output)
        look()
        core.scheduler.check_integrity()
        for until in core.scheduler.outputs.unleased.values():
            core.scheduler.clock.now = until  # type: ignore[attr-defined]
    raise AssertionError("the engine never became idle")


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def prompt_logprobs_of(outputs: list[RequestOutput]) -> list[TokenLogprobs]:
    return [told for output in outputs for told in output.prompt_logprobs or ()]
