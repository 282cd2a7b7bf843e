"""Steps of the engine with a random Llama-3.1-8B: their time without adapters, beside the time to
read their bytes, and the time that adapters add; and the time of each of their kernels.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from bench.gpu import goals
from bench.gpu.adapters import num_slabs
from bench.gpu.ceilings import Ceilings
from bench.gpu.check import note_wrong
from bench.gpu.engine_model import EngineSizes, EngineUnderTest, StepTimes
from bench.gpu.kernel_times import kernel_times
from bench.gpu.machine import Machine
from bench.gpu.rows import Row
from bench.gpu.steps import make_rows
from bench.report import rounded
from engine.steps.batch import ScheduledRow
from lora.layout import Layout

_AGREES, _DIFFERS = 0.1, 0.4
"""Differences as shares of the norm of the logits: the most that two computations of the same may
differ by, and the least that an adapter must change.
"""

_RANK = 16


def rows(machine: Machine, ceilings: Ceilings, switches: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of steps.

    switches: settings of the engine, named as in EngineConfig; they are part of the rows' setup.
    """
    with tempfile.TemporaryDirectory() as folder:
        yield from _Bench(machine, ceilings, switches, Path(folder)).rows()


def kernel_rows(machine: Machine, ceilings: Ceilings, switches: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of the time of each kernel, in steps that are launched kernel by kernel."""
    with tempfile.TemporaryDirectory() as folder:
        eager = {**switches, "enforce_eager": True}
        yield from _Bench(machine, ceilings, eager, Path(folder)).kernel_rows()


class _Bench:
    """One engine, assembled when the first row needs it, and the times of its steps so far."""

    def __init__(
        self, machine: Machine, ceilings: Ceilings, switches: Mapping[str, Any], folder: Path
    ) -> None:
        self.machine, self.ceilings = machine, ceilings
        self.switches, self.folder = switches, folder
        self.most_rows = machine.pick(goals.STEP_BATCH, 2)
        self.context, self.num_steps = machine.pick((1024, 40), (20, 1))
        self.prompt, self.chunk = machine.pick((2048, 256), (20, 5))
        self._was_begun = False
        self._base: dict[str, StepTimes] = {}

    @cached_property
    def engine(self) -> EngineUnderTest:
        if self._was_begun:
            raise RuntimeError("the engine could not be assembled")
        self._was_begun = True
        layout = Layout.of(self.machine.shape, self.machine.dtype.itemsize)
        longest = self.context + self.num_steps + 8
        sizes = EngineSizes(
            shape=self.machine.shape,
            max_num_seqs=self.most_rows,
            max_num_batched_tokens=max(self.prompt, self.most_rows),
            max_model_len=max(longest, self.prompt),
            adapter_slabs=num_slabs(layout, (_RANK,) * self.most_rows),
            kv_blocks=layout.num_blocks(longest),
        )
        return EngineUnderTest(self.machine, sizes, self.switches, self.folder)

    def rows(self) -> Iterator[Row]:
        """Yield the rows, the most important first."""
        yield self._row("engine_check", {"max_num_seqs": self.most_rows}, self._check)
        batches = {self.most_rows: (0, 64, 16, 1), 1: (0, 1)}
        yield from self._decode_rows(batches, "engine_decode", self._decode)
        for count in (0, 1):
            setup = {"tokens": self.prompt, **_describe(count)}
            yield self._row("engine_prefill", setup, partial(self._prefill, count))
        for count in self.machine.pick((0, 16), (0, 1)):
            setup = {"decodes": self.most_rows - 1, "prompt_tokens": self.chunk}
            yield self._row("engine_mixed", setup | _describe(count), partial(self._mixed, count))
        yield from self._decode_rows({16: (0, 16)}, "engine_decode", self._decode)

    def kernel_rows(self) -> Iterator[Row]:
        batches = {self.most_rows: (0, 64)}
        yield from self._decode_rows(batches, "engine_kernels", self._kernels)

    def _decode_rows(
        self,
        batches: Mapping[int, tuple[int, ...]],
        name: str,
        measure: Callable[[int, int], Mapping[str, Any]],
    ) -> Iterator[Row]:
        """Yield a row for each batch and number of adapters, as far as a dry run has room."""
        for batch, counts in batches.items():
            for count in counts:
                if max(batch, count) <= self.machine.pick(batch + count, self.most_rows):
                    setup = {"batch": batch, "context": self.context, **_describe(count)}
                    yield self._row(name, setup, partial(measure, batch, count))

    def _row(self, name: str, setup: dict[str, Any], measure: Callable[[], Any]) -> Row:
        shape = self.machine.shape
        model = f"random Llama, {shape.num_layers} layers of {shape.hidden_size}"
        return Row(f"gpu.{name}", {"model": model, **setup, **self.switches}, measure)

    def _check(self) -> dict[str, Any]:
        """Compares the last token's logits when it is decoded with those when it is the last of the
        prompt, which other kernels compute; and checks that an adapter changes them.
        """
        count = self.prompt // 2
        last, shares = {}, []
        for name, num_adapters in (("base", 0), ("adapter", 1)):
            (whole,) = self._requests([(0, count)], num_adapters)
            pieces = (
                whole._replace(token_ids=whole.token_ids[:-1]),
                whole._replace(token_ids=whole.token_ids[-1:], start=count - 1),
            )
            at_once = self.engine.logits(1)
            for piece in pieces:
                self._steps_well((piece,))
            last[name] = self.engine.logits(1)
            shares.append(float((at_once - last[name]).norm() / at_once.norm()))
            if not shares[-1] <= _AGREES:
                note_wrong(f"{name}: decoded logits are {shares[-1]:.2f} from the prefilled ones")
        changed = float((last["adapter"] - last["base"]).norm() / last["base"].norm())
        if not changed >= _DIFFERS:
            note_wrong(f"an adapter changes the logits by {changed:.2f} only")
        return {
            "decode_to_prefill": rounded(max(shares)),
            "adapter_to_base": rounded(changed),
            "capture_s": rounded(self.engine.capture_s),
            "graphs": len(list(self.engine.runner.graphs.shapes())),
            "runner_gib": rounded(self.engine.runner_bytes / (1 << 30)),
        }

    def _kernels(self, batch: int, num_adapters: int) -> dict[str, Any]:
        requests = self._requests([(self.context - 1, 1)] * batch, num_adapters)
        times = kernel_times(self.engine, requests, self.machine.pick(3, 2))
        return {"step_us": rounded(sum(of["us"] for of in times.values())), "kernels": times}

    def _decode(self, batch: int, num_adapters: int) -> dict[str, Any]:
        engine, copied_per_s = self.engine, self.ceilings.copied_per_s
        requests = self._requests([(self.context - 1, 1)] * batch, num_adapters)
        times = engine.times(requests, self.num_steps, grows=True)
        result = {**_figures(times), "tokens_per_s": rounded(batch / times.step)}
        if not num_adapters:
            self._base[f"decode {batch}"] = times
            kv_bytes = batch * self.context * engine.layout.kv_bytes_per_token
            floor = (engine.weight_bytes + kv_bytes) / copied_per_s
            result |= {"floor_ms": rounded(1e3 * floor), "to_floor": rounded(times.step / floor)}
            if batch == self.most_rows:
                goal = goals.at_most(times.step / floor, goals.STEP_TO_FLOOR)
                result["goals"] = {"engine_step": goal}
            return result
        base_s = self._base_s(f"decode {batch}", partial(self._decode, batch, 0))
        adapter_bytes = num_adapters * _RANK * engine.layout.bytes_per_rank
        limit = goals.lora_limit_s(adapter_bytes, copied_per_s, base_s)
        added = times.step - base_s
        return result | {
            "added_ms": rounded(1e3 * added),
            "percent_of_base": rounded(100 * added / base_s),
            "goals": {"engine_lora": goals.at_most(1e3 * added, 1e3 * limit)},
        }

    def _mixed(self, num_adapters: int) -> dict[str, Any]:
        """Measures decodes that share a step with a chunk of a prompt."""
        lengths = [*[(self.context - 1, 1)] * (self.most_rows - 1), (0, self.chunk)]
        requests = self._requests(lengths, num_adapters)
        return _figures(self.engine.times(requests, self.num_steps, grows=False))

    def _prefill(self, num_adapters: int) -> dict[str, Any]:
        requests = self._requests([(0, self.prompt)], num_adapters)
        times = self.engine.times(requests, self.num_steps, grows=False)
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

    def _requests(
        self, lengths: list[tuple[int, int]], num_adapters: int
    ) -> tuple[ScheduledRow, ...]:
        """Return rows that share so many adapters, after a step of them. One row alone may use all
        blocks.

        lengths: see make_rows.
        """
        blocks = self.engine.blocks
        blocks = [sum(blocks, [])] if len(lengths) == 1 else blocks[: len(lengths)]
        digests = self.engine.use_adapters((_RANK,) * num_adapters)
        requests = make_rows(lengths, blocks, digests)
        self._steps_well(requests)
        return requests

    def _steps_well(self, requests: tuple[ScheduledRow, ...]) -> None:
        """Run one step and check that every row has chosen a token."""
        tokens = self.engine.step(requests).token_ids
        if any(token is None or token < 0 for token in tokens):
            note_wrong("a row's logits are not finite")


def _describe(num_adapters: int) -> dict[str, int]:
    return {"adapters": num_adapters, "rank": _RANK if num_adapters else 0}


def _figures(times: StepTimes) -> dict[str, Any]:
    return {
        "step_ms": rounded(1e3 * times.step),
        "alone_ms": rounded(1e3 * times.alone),
        "launch_ms": rounded(1e3 * times.launch),
        "collect_ms": rounded(1e3 * times.collect),
    }
