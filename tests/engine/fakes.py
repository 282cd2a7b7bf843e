"""Stand-ins at the seams we own, and small factories: a runner without a model, a loader without
files.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.batch import Batch
from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.journal import Journal
from engine.messages import AddRequest, RequestOutput, SamplingParams, StepOutputs
from engine.meter import TokenMeter
from engine.scheduler import Scheduler
from lora.arena import Arena
from lora.layout import Layout, ModelShape
from lora.manager import AdapterManager, Loaded
from registry.ref import AdapterRef

EOS = 0
VOCABULARY = [b"", *(bytes([b]) for b in range(1, 256))]
SHAPE = ModelShape(
    num_layers=2, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16
)
LAYOUT = Layout.of(SHAPE, itemsize=4)


class FakeClock:
    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def fake_token(history: Sequence[int], adapter_digest: str | None) -> int:
    """A function of everything a model's next token depends on; never EOS."""
    seed = f"{adapter_digest} {list(history)}".encode()
    return hashlib.blake2b(seed).digest()[0] % 250 + 1


class FakeRunner:
    """Chooses tokens as a model would: from the positions it was given, in order, per request."""

    def __init__(self, meter: TokenMeter | None = None) -> None:
        self.meter = meter
        self.histories: dict[str, list[int]] = {}

    def run(self, batch: Batch) -> list[int | None]:
        tokens: list[int | None] = []
        prompt = sampled = 0
        for row in batch.rows:
            history = self.histories.setdefault(row.request_id, [])
            assert row.start <= len(history), "a position was skipped"
            del history[row.start :]
            history.extend(row.token_ids)
            prompt += len(row.token_ids) if row.num_output_tokens == 0 else 0
            sampled += row.sampling is not None
            tokens.append(
                fake_token(history, row.adapter_digest) if row.sampling is not None else None
            )
        if self.meter:
            self.meter.count(prompt, sampled)
        return tokens


@dataclass
class FakePacked:
    num_slabs: int
    size_bytes: int


class FakeLoader:
    """Every stage is done by the time of the next poll, or when `finish` says so.

    slabs: how many an adapter takes, by object key.   errors: by (object key, stage).
    """

    def __init__(self, *, at_once: bool = True) -> None:
        self.at_once = at_once
        self.slabs: dict[str, int] = {}
        self.errors: dict[tuple[str, str], tuple[str, bool]] = {}
        self.under_way: list[Loaded] = []
        self.done: list[Loaded] = []
        self.num_fetches = 0

    def fetch(self, ref: AdapterRef) -> None:
        self.num_fetches += 1
        self._begin(Loaded(ref.object_key, "disk"))

    def load(self, ref: AdapterRef) -> None:
        packed = FakePacked(self.slabs.get(ref.object_key, 1), ref.size_bytes)
        self._begin(Loaded(ref.object_key, "host", packed))

    def place(self, ref: AdapterRef, packed: FakePacked, slabs: list[int]) -> None:
        assert len(slabs) == packed.num_slabs
        self._begin(Loaded(ref.object_key, "device", f"tables of {ref.digest}"))

    def finish(self, count: int = 1) -> None:
        self.done += self.under_way[:count]
        del self.under_way[:count]

    def poll(self) -> list[Loaded]:
        done, self.done = self.done, []
        return done

    def _begin(self, loaded: Loaded) -> None:
        if error := self.errors.get((loaded.key, loaded.stage)):
            loaded = Loaded(loaded.key, loaded.stage, error=error[0], permanent=error[1])
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
    deadline_s: float = 120.0,
    **sampling: object,
) -> AddRequest:
    prompt = tuple(hashlib.blake2b(request_id.encode(), digest_size=32).digest()) * 64
    return AddRequest(
        request_id=request_id,
        tenant_id=tenant_id,
        prompt_token_ids=prompt[:prompt_len],
        sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling),  # type: ignore[arg-type]
        token_lease=max_tokens if token_lease is None else token_lease,
        deadline_s=deadline_s,
        adapter=adapter,
    )


def make_scheduler(
    num_slabs: int = 64,
    loader: FakeLoader | None = None,
    clock: FakeClock | None = None,
    **limits: int,
) -> Scheduler:
    longest = min(256, num_slabs * LAYOUT.block_size)
    limits = {"max_model_len": longest, "max_num_seqs": 8, "max_num_batched_tokens": 64} | limits
    clock = clock or FakeClock()
    adapters = AdapterManager(Arena(num_slabs), loader or FakeLoader(), clock=clock)
    config = SchedulerConfig(**limits)
    return Scheduler(config, LAYOUT, adapters, VOCABULARY, [EOS], clock)


def make_core(directory: Path, scheduler: Scheduler | None = None, **limits: int) -> EngineCore:
    journal = Journal(directory / "journal", "eng-1", "base-1")
    runner = FakeRunner(TokenMeter(directory / "meter"))
    return EngineCore(scheduler or make_scheduler(**limits), runner, journal)


def expected_tokens(message: AddRequest) -> list[int]:
    """What the request gets when it runs alone, without stops."""
    digest = message.adapter.digest if message.adapter else None
    history = list(message.prompt_token_ids)
    for _ in range(message.sampling_params.max_tokens):
        history.append(fake_token(history, digest))
    return history[len(message.prompt_token_ids) :]


def run_until_idle(core: EngineCore, max_steps: int = 2000) -> dict[str, list[RequestOutput]]:
    """Step until nothing is left; outputs by request. Integrity is checked after every step."""
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(max_steps):
        if not core.scheduler.has_work:
            return outputs
        for _, message in core.step():
            if isinstance(message, StepOutputs):
                for output in message.outputs:
                    outputs.setdefault(output.request_id, []).append(output)
        core.scheduler.check_integrity()
    raise AssertionError("the engine never became idle")


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]
