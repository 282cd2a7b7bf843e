"""Requests that arrive on schedule, or all at once: scheduler, adapters and device in one process,
without a server.
"""

import hashlib
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bench.gpu.adapters import BASE_REVISION, make_form
from bench.gpu.ceilings import Ceilings
from bench.gpu.check import note_wrong
from bench.gpu.engine_model import make_model_config, make_random_weights
from bench.gpu.machine import Machine
from bench.gpu.rows import Row
from bench.outcome import Outcome
from bench.report import rounded, summarize
from bench.workload import BenchRequest, Lengths, Workload, make_requests
from engine.core import EngineCore
from engine.messages import AddRequest, RequestOutput, SamplingParams, StepOutputs
from lora.disk_cache import packed_path
from lora.layout import PROJECTIONS, Layout
from lora.packed import PackedForm, PackedHeader
from registry.ref import AdapterRef
from tests.gpu.disk_engine import make_disk_engine

_BASE = "base"
_RANK = 16
_TENANTS = 8
_CONCURRENCY = 64
_WAIT_S = 600.0
_HOST_CACHE_BYTES = 4 << 30


def rows(machine: Machine, _: Ceilings, switches: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row per rate, all on one engine. An adapter is cold until its first request.

    switches: settings of the engine, named as in EngineConfig; they are part of the rows' setup.
    """
    count, num_adapters = machine.pick((240, 32), (3, 2))
    prompts = machine.pick(Lengths(128, 512), Lengths(4, 4))
    outputs = machine.pick(Lengths(32, 128), Lengths(2, 2))
    limits = machine.pick((256, 2048, 2048), (4, 16, 32))
    with tempfile.TemporaryDirectory() as folder:
        engine = _Engine(machine, switches, Path(folder), num_adapters, limits)
        for rate in machine.pick((10.0, 20.0, 40.0), (1e6,)):
            workload = Workload(
                base_model=_BASE, models=tuple(engine.names), popularity="zipf", rate=rate,
                num_requests=count, prompt_tokens=prompts, output_tokens=outputs,
                vocab_size=machine.vocab_size, seed=int(rate),
            )  # fmt: skip
            setup = {
                "rate": rate, "requests": count, "adapters": num_adapters, "rank": _RANK,
                "prompt_tokens": str(prompts), "output_tokens": str(outputs), **switches,
            }  # fmt: skip
            yield Row("gpu.open_loop", setup, partial(engine.measure, workload))


def concurrent_rows(machine: Machine, _: Ceilings, switches: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row per number of adapters: the throughput of requests that all come at once, as a
    percentage of the throughput without adapters. Adapters have been used before.
    """
    concurrency, length = machine.pick((_CONCURRENCY, 200), (2, 4))
    limits = machine.pick((concurrency, 2048, 512), (concurrency, 16, 32))
    counts = machine.pick((0, 16, 64, 4, 1), (0, 2))
    with tempfile.TemporaryDirectory() as folder:
        engine = _Engine(machine, switches, Path(folder), max(counts), limits)
        for count in counts:
            workload = Workload(
                base_model=_BASE, models=tuple(engine.names[:count]),
                popularity="zipf" if count else "none", rate=math.inf,
                num_requests=2 * concurrency, prompt_tokens=Lengths(length, length),
                output_tokens=Lengths(length, length), vocab_size=machine.vocab_size, seed=count,
            )  # fmt: skip
            setup = {
                "concurrency": concurrency, "requests": 2 * concurrency, "popularity": "zipf",
                "prompt_tokens": length, "output_tokens": length, "adapters": count,
                "rank": _RANK if count else 0, **switches,
            }  # fmt: skip
            yield Row("gpu.concurrent", setup, partial(engine.measure_warm, workload))


class _Engine:
    """An engine with a random model, and packed adapters on disk.

    limits: max_num_seqs, max_num_batched_tokens and max_model_len of EngineConfig.
    """

    def __init__(
        self,
        machine: Machine,
        switches: Mapping[str, Any],
        folder: Path,
        num_adapters: int,
        limits: tuple[int, int, int],
    ) -> None:
        self.machine, self.switches, self.folder = machine, switches, folder
        layout = Layout.of(machine.shape, machine.dtype.itemsize)
        self.form = make_form(machine, layout)
        self.names = [f"a{i}" for i in range(num_adapters)]
        self.limits = limits
        self._base: dict[str, Any] = {}
        self._used: set[str] = set()

    @cached_property
    def refs(self) -> dict[str, AdapterRef]:
        (self.folder / "cache").mkdir()
        return _write_adapters(self.machine, self.form, self.folder / "cache", self.names)

    @cached_property
    def core(self) -> EngineCore:
        machine = self.machine
        rows, tokens, longest = self.limits
        of_model = machine.shape, machine.vocab_size
        return make_disk_engine(
            machine.new_device(), make_model_config(*of_model), self.form,
            make_random_weights(machine, *of_model), self.folder, machine.pick(None, 40),
            host_cache_bytes=machine.pick(_HOST_CACHE_BYTES, 1 << 20), switches=self.switches,
            max_num_seqs=rows, max_num_batched_tokens=tokens, max_model_len=longest,
        )  # fmt: skip

    # The benchmarks run in inference mode, but the loader's threads, which write to the arena, do
    # not; so the mode is off here.
    @torch.inference_mode(mode=False)
    def measure(self, workload: Workload) -> dict[str, Any]:
        refs, core = self.refs, self.core
        steps, requests = core.num_steps, make_requests(workload)
        outcomes = _Load(core, refs, requests).run()
        for outcome, request in zip(outcomes, requests, strict=True):
            if outcome.error is not None or len(outcome.token_ids) != request.max_tokens:
                note_wrong(f"request {outcome.index}: {outcome.error}, {len(outcome.token_ids)}")
        return {**summarize(outcomes, _BASE), "steps": core.num_steps - steps}

    def measure_warm(self, workload: Workload) -> dict[str, Any]:
        """Measure a workload whose adapters, or base model, had a short request before, and compare
        it with the same one without adapters.
        """
        models = workload.models or (_BASE,)
        if not self._used.issuperset(models):
            first = replace(
                workload, popularity="distinct", models=models, num_requests=len(models),
                output_tokens=Lengths(1, 1), seed=-1 - workload.seed,
            )  # fmt: skip
            self.measure(first)
            self._used |= {*models}
        result = self.measure(workload)
        if not workload.models:
            self._base = result
            return result
        if not self._base:  # its row is from an earlier run
            self.measure_warm(replace(workload, models=(), popularity="none"))
        name = "output_tokens_per_s"
        return result | {"percent_of_base": rounded(100 * result[name] / self._base[name])}


@dataclass
class _Load:
    """Sends requests when they are due, and notes their outcomes."""

    core: EngineCore
    refs: dict[str, AdapterRef]
    requests: Sequence[BenchRequest]
    sent_s: dict[int, float] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    chunks: dict[int, list[tuple[float, tuple[int, ...]]]] = field(default_factory=dict)

    def run(self) -> list[Outcome]:
        start, waiting = time.monotonic(), iter(self.requests)
        request = next(waiting, None)
        while len(self.outcomes) < len(self.requests):
            now = time.monotonic() - start
            while request is not None and request.due_s <= now:
                self._send(request, now)
                request = next(waiting, None)
            for _, message in self.core.step():
                if isinstance(message, StepOutputs):
                    for output in message.outputs:
                        self._take(output, time.monotonic() - start)
        return [self.outcomes[request.index] for request in self.requests]

    def _send(self, request: BenchRequest, now: float) -> None:
        self.sent_s[request.index], self.chunks[request.index] = now, []
        sampling = SamplingParams(max_tokens=request.max_tokens, temperature=0.0)
        tenant = f"t{request.index % _TENANTS}"
        message = AddRequest(
            request_id=str(request.index), tenant_id=tenant, cache_salt=tenant,
            prompt_token_ids=request.prompt_token_ids, sampling_params=sampling,
            token_lease=request.max_tokens, deadline_s=_WAIT_S, first_token_timeout_s=_WAIT_S,
            adapter=self.refs.get(request.model),
        )  # fmt: skip
        refused = self.core.handle("bench", message)
        assert not refused, refused

    def _take(self, output: RequestOutput, now: float) -> None:
        number = int(output.request_id)
        if output.new_token_ids:
            self.chunks[number].append((now, tuple(output.new_token_ids)))
        if output.is_last:
            request, chunks = self.requests[number], self.chunks[number]
            self.outcomes[number] = Outcome(
                index=number, model=request.model, due_s=request.due_s, end_s=now,
                num_prompt_tokens=len(request.prompt_token_ids), sent_s=self.sent_s[number],
                chunk_s=tuple(at for at, _ in chunks),
                token_ids=tuple(token for _, tokens in chunks for token in tokens),
                error=None if output.finish_reason == "length" else output.stop_cause,
            )  # fmt: skip


def _write_adapters(
    machine: Machine, form: PackedForm, cache: Path, names: Sequence[str]
) -> dict[str, AdapterRef]:
    """Write packed files into `cache`, as the fetcher does, all with the same random tiles."""
    layout = form.layout
    places = list(product(range(layout.shape.num_layers), range(len(PROJECTIONS))))
    tiles, num_slabs = layout.pack(dict.fromkeys(places, _RANK))
    std = layout.shape.hidden_size**-0.5
    values = machine.randn(num_slabs, layout.slab_bytes // layout.itemsize, std=std)
    slabs = values.view(torch.uint8).cpu().numpy().tobytes()
    checksum = hashlib.sha256(slabs).hexdigest()
    refs = {}
    for name in names:
        digest = hashlib.sha256(name.encode()).hexdigest()
        header = PackedHeader(
            digest=digest, base_revision=BASE_REVISION, form_id=form.form_id, num_slabs=num_slabs,
            slab_bytes=layout.slab_bytes, tiles=tuple(tiles),
            scales=tuple((*place, 1.0) for place in places), invocation_tokens=None,
            checksums=(checksum,),
        )  # fmt: skip
        packed_path(cache, digest, form.form_id).write_bytes(header.to_bytes() + slabs)
        refs[name] = AdapterRef(name, 1, digest, f"tenants/t/{digest}", _RANK, len(slabs))
    return refs
