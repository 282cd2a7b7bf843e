"""Time that adapters add to a chain of layers."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from bench.gpu import goals
from bench.gpu.adapters import fill_tiles, make_form, num_slabs, place
from bench.gpu.ceilings import Ceilings
from bench.gpu.check import attempt, check_close, note_wrong
from bench.gpu.lora_chain import Chain, LayerOutputs, Project, by_torch, systems
from bench.gpu.machine import Machine
from bench.gpu.rows import Row
from bench.gpu.steps import Step, deal_blocks, make_rows, make_step
from bench.report import rounded
from kernels import reference
from kernels.gpu import ops
from lora.layout import Layout

Ranks = tuple[int, ...]

_MIXED = (8, 16, 32, 64)
_MODEL = "model"


def rows(machine: Machine, ceilings: Ceilings) -> Iterator[Row]:
    """Yield the rows of decodes and of prefills, the most important first."""
    lab = _Lab(machine, ceilings)
    most = machine.pick(64, 3)
    yield from (lab.decode_row(most, (16,) * n) for n in machine.pick((most, 16), (most,)))
    for adapters in machine.pick((1, 16), (1,)):
        yield lab.prefill_row(machine.pick(2048, 65), (16,) * adapters)
    mixed = tuple(_MIXED[i % len(_MIXED)] for i in range(min(16, most)))
    yield from (lab.decode_row(most, ranks) for ranks in ((16,), mixed))
    for tokens in machine.pick((1, 16, 256), ()):
        yield lab.decode_row(tokens, (16,) * tokens)


@dataclass(frozen=True)
class _Case:
    """Inputs of a chain of layers in one step.

    x: inputs of a layer, and outputs of its attention.   kv: KV of all layers.
    """

    x: tuple[torch.Tensor, torch.Tensor]
    step: Step
    kv: torch.Tensor


@dataclass(frozen=True)
class _Expected:
    """The last layer's outputs by torch: in the same dtype, and in float32."""

    torchs: LayerOutputs
    exact: LayerOutputs


class _Lab:
    """The chain and its arena, made when the first row needs them."""

    def __init__(self, machine: Machine, ceilings: Ceilings) -> None:
        self.machine, self.ceilings = machine, ceilings
        self.form = make_form(machine, Layout.of(machine.shape, machine.dtype.itemsize))

    @cached_property
    def chain(self) -> Chain:
        return Chain(self.machine)

    def decode_row(self, tokens: int, ranks: Ranks) -> Row:
        """ranks: those of the adapters that share the step."""
        measure = partial(self._decode, tokens, ranks)
        return Row("gpu.lora_decode", _setup(tokens, ranks), measure)

    def prefill_row(self, tokens: int, ranks: Ranks) -> Row:
        """ranks: those of the adapters, each of which has a prompt."""
        measure = partial(self._prefill, tokens, ranks)
        return Row("gpu.lora_prefill", _setup(tokens, ranks), measure)

    def _decode(self, tokens: int, ranks: Ranks) -> dict[str, Any]:
        result = self._measure([(0, 1)] * tokens, ranks)
        added_us, base_s = result[_MODEL].get("added_us", math.nan), result["base_us"] / 1e6
        limit = goals.lora_limit_s(self._bytes(ranks), self.ceilings.copied_per_s, base_s)
        return result | {"goals": {"lora_decode": goals.at_most(added_us, 1e6 * limit)}}

    def _prefill(self, tokens: int, ranks: Ranks) -> dict[str, Any]:
        result = self._measure([(0, tokens // len(ranks))] * len(ranks), ranks)
        share = result[_MODEL].get("added_us", math.nan) / result["base_us"]
        return result | {"goals": {"lora_prefill": goals.at_most(share, goals.PREFILL_LORA_SHARE)}}

    def _measure(self, lengths: list[tuple[int, int]], ranks: Ranks) -> dict[str, Any]:
        """Measure all systems.   lengths: (start, count) of each row."""
        case = self._make_case(lengths, ranks)
        base_s = self._seconds(case, by_torch)
        floor_s = goals.floor_s(self._bytes(ranks), self.ceilings.copied_per_s)
        result: dict[str, Any] = {
            "base_us": rounded(1e6 * base_s),
            "floor_us": rounded(1e6 * floor_s),
        }
        expected = self._expected(case)
        for name, project in systems(self.machine, case.step.inputs, ops).items():
            result[name] = attempt(partial(self._added, case, project, expected, base_s))
            if "failed" in result[name]:
                note_wrong(f"{name}: {result[name]['failed']}")
        return result

    def _added(
        self, case: _Case, project: Project, expected: _Expected, base_s: float
    ) -> dict[str, Any]:
        """Return the time that adapters add to the chain with `project`; the last layer's outputs
        are checked first.
        """
        last = self.chain.num_layers - 1
        layer = partial(self.chain.layer, last, *case.x, case.step.inputs, case.kv, project, ops)
        ours, torchs, exact = self.machine.run(layer), expected.torchs, expected.exact
        check_close("q", ours.q, torchs.q, exact.q)
        check_close("a layer", ours.down, torchs.down, exact.down)
        added_s = self._seconds(case, project) - base_s
        return {
            "added_us": rounded(1e6 * added_s),
            "percent_of_base": rounded(100 * added_s / base_s),
        }

    def _seconds(self, case: _Case, project: Project) -> float:
        work = self.chain.work(case.x, case.step.inputs, case.kv, project, ops)
        return self.machine.seconds(work)

    def _expected(self, case: _Case) -> _Expected:
        step = case.step.inputs
        by_reference = systems(self.machine, step, reference)["plain"]

        def last_layer(x: torch.Tensor, attended: torch.Tensor) -> LayerOutputs:
            last = self.chain.num_layers - 1
            return self.chain.layer(last, x, attended, step, case.kv, by_reference, reference)

        wide = [x.float() for x in case.x]
        return _Expected(torchs=last_layer(*case.x), exact=last_layer(*wide))

    def _make_case(self, lengths: list[tuple[int, int]], ranks: Ranks) -> _Case:
        layout, there = self.form.layout, self.machine.there
        per_row = layout.num_blocks(max(count for _, count in lengths))
        first = num_slabs(layout, ranks)
        whole = first + len(lengths) * per_row
        slabs = torch.empty(whole, layout.slab_bytes, dtype=torch.uint8, device=there)
        fill_tiles(slabs, layout, self.machine.dtype)
        tables = place(self.form, ranks, there)
        blocks = deal_blocks(first, len(lengths), per_row)
        requests = make_rows(lengths, blocks, [t.digest for t in tables])
        step = make_step(self.machine, self.form, slabs, requests, tables)
        kv = slabs.view(self.machine.dtype)[:, : layout.kv_block_elems]
        return _Case(
            x=self.chain.inputs(sum(count for _, count in lengths)),
            step=step,
            kv=kv.unflatten(1, layout.kv_shape),
        )

    def _bytes(self, ranks: Ranks) -> int:
        """Bytes of the distinct adapters of a step."""
        return sum(ranks) * self.form.layout.bytes_per_rank


def _setup(tokens: int, ranks: Ranks) -> dict[str, Any]:
    of_ranks = " ".join(map(str, sorted(set(ranks))))
    return {"tokens": tokens, "adapters": len(ranks), "rank": of_ranks}
