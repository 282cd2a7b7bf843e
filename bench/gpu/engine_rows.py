"""Steps of the engine with a random Llama-3.1-8B: their time without adapters, beside the time to
read their bytes, and the time that adapters add; and the time of each of their kernels.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from bench.gpu import goals
from bench.gpu.adapters import make_form, num_slabs
from bench.gpu.ceilings import Ceilings
from bench.gpu.check import note_wrong
from bench.gpu.engine_model import EngineSizes, EngineUnderTest, Precision, StepTimes
from bench.gpu.kernel_times import kernel_times
from bench.gpu.machine import Machine
from bench.gpu.rows import NoRoom, Row
from bench.gpu.steps import make_rows
from bench.report import rounded
from engine.batch import ScheduledRow
from lora.layout import Layout, ModelShape

_SPARE_BYTES = 8 << 30
"""Device memory for graphs, the step's buffers, and a layer's weights while they are fused."""

_FEW_LAYERS, _LEAST_BYTES = 8, 70 << 30
"""The model has this few layers if the device has less memory than this."""

_AGREES: dict[Precision, float] = {"16 bits": 0.1, "fp8": 0.3}
_DIFFERS = 0.4
"""Differences as shares of the norm of the logits: the most that two computations of the same may
differ by, and the least that an adapter must change.
"""

_RANK = 16


@dataclass(frozen=True)
class Cases:
    """Steps to measure, by the numbers of adapters that share them.

    decodes: for each number of rows.   mixed: for decodes beside a part of a prompt.
    prefills: for a prompt alone.
    """

    decodes: Mapping[int, tuple[int, ...]]
    mixed: tuple[int, ...] = ()
    prefills: tuple[int, ...] = ()

    @property
    def tiny(self) -> "Cases":
        """The same kinds of steps for a dry run."""
        return Cases({2: (0, 2)}, (0, 1) if self.mixed else (), (0, 1) if self.prefills else ())


ALL = Cases({1: (0, 1), 16: (0, 1, 16), 64: (0, 1, 16, 64), 256: (0, 1, 16, 256)}, (0, 16), (0, 1))
FP8 = Cases({goals.STEP_BATCH: (0, 1, 16, 64)})
QUICK = Cases({goals.STEP_BATCH: (0, 16, 64), 1: (0,)}, prefills=(0, 1))
_KERNELS = Cases({goals.STEP_BATCH: (0, 64)})


def rows(
    machine: Machine,
    ceilings: Ceilings,
    precision: Precision,
    switches: Mapping[str, Any],
    cases: Cases,
) -> Iterator[Row]:
    """Yield all rows. switches: settings of the engine, named as in EngineConfig; they are part of
    the rows' setup.
    """
    with tempfile.TemporaryDirectory() as folder:
        yield from _Bench(machine, ceilings, precision, switches, cases, Path(folder)).rows()


def kernel_rows(machine: Machine, ceilings: Ceilings, switches: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of the time of each kernel, in steps that are launched kernel by kernel."""
    eager = {**switches, "enforce_eager": True}
    with tempfile.TemporaryDirectory() as folder:
        bench = _Bench(machine, ceilings, "16 bits", eager, _KERNELS, Path(folder))
        yield from bench.kernel_rows()


class _Bench:
    """One engine, assembled when the first row needs it, and the times of its steps so far."""

    def __init__(
        self,
        machine: Machine,
        ceilings: Ceilings,
        precision: Precision,
        switches: Mapping[str, Any],
        cases: Cases,
        folder: Path,
    ) -> None:
        self.machine, self.ceilings = machine, ceilings
        self.precision: Precision = precision
        self.switches = switches
        self.cases = machine.pick(cases, cases.tiny)
        self.most_rows = max(self.cases.decodes)
        self.folder = folder
        self._was_begun = False
        self.context, self.num_steps = machine.pick((1024, 40), (20, 1))
        self.prompt, self.chunk = machine.pick((2048, 256), (20, 5))
        self._base: dict[str, StepTimes] = {}

    @cached_property
    def engine(self) -> EngineUnderTest:
        if self._was_begun:
            raise NoRoom("the engine could not be assembled")
        self._was_begun = True
        sizes = self._sizes()
        return EngineUnderTest(self.machine, sizes, self.precision, self.switches, self.folder)

    def rows(self) -> Iterator[Row]:
        yield self._row("engine_capture", {"max_num_seqs": self.most_rows}, self._capture)
        yield self._row("engine_check", {"tokens": self.prompt // 2}, self._check)
        yield from self._decode_rows("engine_decode", self._decode)
        decodes = min(goals.STEP_BATCH, self.most_rows - 1)
        for count in self.cases.mixed:
            setup = {"decodes": decodes, "prompt_tokens": self.chunk, **_describe(count)}
            yield self._row("engine_mixed", setup, partial(self._mixed, decodes, count))
        for count in self.cases.prefills:
            setup = {"tokens": self.prompt, **_describe(count)}
            yield self._row("engine_prefill", setup, partial(self._prefill, count))

    def kernel_rows(self) -> Iterator[Row]:
        yield from self._decode_rows("engine_kernels", self._kernels)

    def _decode_rows(
        self, name: str, measure: Callable[[int, int], Mapping[str, Any]]
    ) -> Iterator[Row]:
        for batch, counts in self.cases.decodes.items():
            for count in counts:
                setup = {"batch": batch, "context": self.context, **_describe(count)}
                yield self._row(name, setup, partial(measure, batch, count))

    def _row(self, name: str, setup: dict[str, Any], measure: Callable[[], Any]) -> Row:
        shape = self._shape
        model = f"random Llama, {shape.num_layers} layers of {shape.hidden_size}"
        weights = "fp8" if self.precision == "fp8" else self.machine.dtype_name
        setup = {"model": model, "weights": weights, **setup, **self.switches}
        return Row(f"gpu.{name}", setup, measure)

    # ---- sizes ----

    @cached_property
    def _shape(self) -> ModelShape:
        _, total = self.machine.memory_bytes
        shape = self.machine.shape
        few = self.machine.pick(_FEW_LAYERS, 1)
        return replace(shape, num_layers=few) if total < _LEAST_BYTES else shape

    def _sizes(self) -> EngineSizes:
        """Return sizes with slabs for the adapters of the largest case, or as many as fit."""
        layout, longest = self._layout, self.context + self.num_steps + 8
        sizes = EngineSizes(
            shape=self._shape,
            max_num_seqs=self.most_rows,
            max_num_batched_tokens=max(self.prompt, self.most_rows),
            max_model_len=max(longest, self.prompt),
            adapter_slabs=num_slabs(layout, (_RANK,) * self.most_rows),
            kv_blocks=layout.num_blocks(longest),
        )
        free, _ = self.machine.memory_bytes
        # Weights are in memory twice: as loaded, and fused.
        left = free - 2 * self._weight_bytes - self.machine.pick(_SPARE_BYTES, 0)
        left_slabs = left // layout.slab_bytes - sizes.max_num_seqs * sizes.kv_blocks
        if left_slabs < 1:
            raise NoRoom("weights and KV do not fit")
        return replace(sizes, adapter_slabs=min(sizes.adapter_slabs, left_slabs))

    @cached_property
    def _layout(self) -> Layout:
        itemsize = self.machine.dtype.itemsize
        kv_itemsize = 1 if self.precision == "fp8" else itemsize
        layout = Layout.of(self._shape, itemsize, kv_itemsize=kv_itemsize)
        return make_form(self.machine, layout).layout

    @property
    def _weight_bytes(self) -> int:
        shape = self._shape
        of_layer = sum(a * b for a, b in (shape.features(p) for p in range(7)))
        vocabulary = 2 * self.machine.vocab_size * shape.hidden_size
        return (shape.num_layers * of_layer + vocabulary) * self.machine.dtype.itemsize

    # ---- rows ----

    def _capture(self) -> dict[str, Any]:
        engine = self.engine
        return {
            "seconds": rounded(engine.capture_s),
            "graphs": len(list(engine.runner.graphs.shapes())),
            "runner_gib": rounded(engine.runner_bytes / (1 << 30)),
            "weights_read_gb": rounded(engine.weight_bytes / 1e9),
        }

    def _check(self) -> dict[str, Any]:
        """Compares the last token's logits when it is decoded with those when it is the last of the
        prompt, which other kernels compute; and checks that an adapter changes them.
        """
        count = self.prompt // 2
        last, shares = {}, []
        for name, num_adapters in (("base", 0), ("adapter", 1)):
            digests = self._use(num_adapters)
            (whole,) = make_rows([(0, count)], [sum(self.engine.blocks, [])], digests)
            pieces = (
                whole._replace(token_ids=whole.token_ids[:-1]),
                whole._replace(token_ids=whole.token_ids[-1:], start=count - 1),
            )
            self._steps_well((whole,))
            at_once = self.engine.logits(1)
            for piece in pieces:
                self._steps_well((piece,))
            last[name] = self.engine.logits(1)
            shares.append(float((at_once - last[name]).norm() / at_once.norm()))
            if not shares[-1] <= _AGREES[self.precision]:
                note_wrong(f"{name}: decoded logits are {shares[-1]:.2f} from the prefilled ones")
        changed = float((last["adapter"] - last["base"]).norm() / last["base"].norm())
        if not changed >= _DIFFERS:
            note_wrong(f"an adapter changes the logits by {changed:.2f} only")
        return {"decode_to_prefill": rounded(max(shares)), "adapter_to_base": rounded(changed)}

    def _kernels(self, batch: int, num_adapters: int) -> dict[str, Any]:
        requests = self._decodes(batch, num_adapters)
        times = kernel_times(self.engine, requests, self.machine.pick(3, 2))
        return {"step_us": rounded(sum(of["us"] for of in times.values())), "kernels": times}

    def _decodes(self, batch: int, num_adapters: int) -> tuple[ScheduledRow, ...]:
        """Return decodes that share so many adapters, after a step of them."""
        digests = self._use(num_adapters)
        lengths = [(self.context - 1, 1)] * batch
        requests = make_rows(lengths, self.engine.blocks[:batch], digests)
        self._steps_well(requests)
        return requests

    def _decode(self, batch: int, num_adapters: int) -> dict[str, Any]:
        engine = self.engine
        requests = self._decodes(batch, num_adapters)
        times = engine.times(requests, self.num_steps, grows=True)
        name = f"decode {batch}"
        if not num_adapters:
            self._base[name] = times
        layout = engine.layout
        kv_bytes = batch * self.context * layout.kv_bytes_per_token
        floor = goals.decode_floor_s(engine.weight_bytes, kv_bytes, self.ceilings.copied_per_s)
        result = {**_figures(times), "tokens_per_s": rounded(batch / times.step)}
        if not num_adapters:
            result |= {"floor_ms": rounded(1e3 * floor), "to_floor": rounded(times.step / floor)}
            if batch == self.machine.pick(goals.STEP_BATCH, batch):
                goal = goals.at_most(times.step / floor, goals.STEP_TO_FLOOR)
                result["goals"] = {"engine_step": goal}
            return result
        base_s = self._base_s(name, partial(self._decode, batch, 0))
        adapter_bytes = num_adapters * _RANK * layout.bytes_per_rank
        limit = goals.lora_limit_s(adapter_bytes, self.ceilings.copied_per_s, base_s)
        added = times.step - base_s
        return result | {
            "added_ms": rounded(1e3 * added),
            "percent_of_base": rounded(100 * added / base_s),
            "goals": {"engine_lora": goals.at_most(1e3 * added, 1e3 * limit)},
        }

    def _mixed(self, decodes: int, num_adapters: int) -> dict[str, Any]:
        """Measures decodes that share a step with a chunk of a prompt."""
        engine = self.engine
        digests = self._use(num_adapters)
        lengths = [*[(self.context - 1, 1)] * decodes, (0, self.chunk)]
        requests = make_rows(lengths, engine.blocks[: decodes + 1], digests)
        self._steps_well(requests)
        times = engine.times(requests, self.num_steps, grows=False)
        if not num_adapters:
            self._base["mixed"] = times
            return _figures(times)
        base_s = self._base_s("mixed", partial(self._mixed, decodes, 0))
        return _figures(times) | {"percent_of_base": rounded(100 * (times.step / base_s - 1))}

    def _prefill(self, num_adapters: int) -> dict[str, Any]:
        engine = self.engine
        digests = self._use(num_adapters)
        requests = make_rows([(0, self.prompt)], [sum(engine.blocks, [])], digests)
        self._steps_well(requests)
        times = engine.times(requests, self.num_steps, grows=False)
        result = {**_figures(times), "tokens_per_s": rounded(self.prompt / times.step)}
        if not num_adapters:
            self._base["prefill"] = times
            return result
        base_s = self._base_s("prefill", partial(self._prefill, 0))
        share = (times.step - base_s) / base_s
        goal = goals.at_most(share, goals.PREFILL_LORA_SHARE)
        return result | {"percent_of_base": rounded(100 * share), "goals": {"engine_prefill": goal}}

    def _base_s(self, name: str, measure: Callable[[], Any]) -> float:
        """Return the seconds of the step without adapters. It is measured again if its row is from
        an earlier run.
        """
        if name not in self._base:
            measure()
        return self._base[name].step

    def _use(self, num_adapters: int) -> list[str]:
        """Place so many adapters and return their digests."""
        ranks = (_RANK,) * num_adapters
        if num_slabs(self.engine.layout, ranks) > self.engine.sizes.adapter_slabs:
            raise NoRoom(f"{num_adapters} adapters of rank {_RANK} do not fit")
        return self.engine.use_adapters(ranks)

    def _steps_well(self, requests: Any) -> None:
        """Run one step and check that every row has chosen a token."""
        tokens = self.engine.step(requests).token_ids
        if any(token is None or token < 0 for token in tokens):
            note_wrong("a row's logits are not finite")


def _describe(num_adapters: int) -> dict[str, int]:
    return {"adapters": num_adapters, "rank": _RANK if num_adapters else 0}


def _figures(times: StepTimes) -> dict[str, float]:
    return {
        "step_ms": rounded(1e3 * times.step),
        "alone_ms": rounded(1e3 * times.alone),
        "launch_ms": rounded(1e3 * times.launch),
        "collect_ms": rounded(1e3 * times.collect),
    }
