"""Time that adapters add to a chain of layers: by our kernels, plain torch, vLLM's kernels."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from bench.gpu import goals, vllm_lora
from bench.gpu.adapters import fill_tiles, make_form, num_slabs, place
from bench.gpu.ceilings import Ceilings
from bench.gpu.check import attempt, check_close, note_wrong
from bench.gpu.lora_chain import (
    SITES,
    Chain,
    LayerOutputs,
    Project,
    by_torch,
    our_capped_systems,
    our_systems,
)
from bench.gpu.lora_torch import Stacked
from bench.gpu.machine import Machine
from bench.gpu.rows import Row
from bench.gpu.steps import Step, deal_blocks, make_rows, make_step
from bench.report import rounded
from kernels import reference
from kernels.gpu import ops
from kernels.work import Site
from lora.layout import Layout
from lora.sites import site_of

Ranks = tuple[int, ...]

_MIXED = (8, 16, 32, 64)
_MODEL = "model"


def rows(machine: Machine, ceilings: Ceilings) -> Iterator[Row]:
    """Yield the rows of decodes, then of prefills."""
    lab = _Lab(machine, ceilings)
    several = machine.pick(16, 2)
    for tokens in machine.pick((1, 16, 64, 256), (3,)):
        mixes = _mixes(tokens, several)
        for ranks in machine.pick(mixes, [mixes[0], mixes[-1]]):
            yield Row("gpu.lora_decode", _setup(tokens, ranks), partial(lab.decode, tokens, ranks))
    tokens = machine.pick(2048, 65)
    for adapters in machine.pick((1, 4, 16), (1,)):
        ranks = (16,) * adapters
        yield Row("gpu.lora_prefill", _setup(tokens, ranks), partial(lab.prefill, tokens, ranks))


def _setup(tokens: int, ranks: Ranks) -> dict[str, Any]:
    of_ranks = " ".join(map(str, sorted(set(ranks))))
    return {"tokens": tokens, "adapters": len(ranks), "rank": of_ranks}


def _mixes(tokens: int, several: int) -> list[Ranks]:
    """Return mixes, without duplicates; each lists the ranks of the adapters that share a step."""
    some = min(several, tokens)
    mixed = tuple(_MIXED[i % len(_MIXED)] for i in range(some))
    mixes = [(16,), (16,) * some, (16,) * tokens, (64,) * some, mixed]
    return list(dict.fromkeys(mixes))


@dataclass(frozen=True)
class _Case:
    """Inputs of a chain of layers in one step.

    x: inputs of a layer, and outputs of its attention.   kv: KV of all layers.
    """

    x: tuple[torch.Tensor, torch.Tensor]
    step: Step
    kv: torch.Tensor
    slots: torch.Tensor


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

    def decode(self, tokens: int, ranks: Ranks) -> dict[str, Any]:
        case = self._make_case([(0, 1)] * tokens, ranks)
        stacked = self._stacked(case, range(self.machine.shape.num_layers))
        capped = our_capped_systems(self.machine, case.step.inputs, ops)
        comparators: dict[str, Callable[[], Project]] = {
            **{name: lambda project=project: project for name, project in capped.items()},
            "torch_gathered": lambda: stacked.gathered,
            "torch_masked": lambda: stacked.masked,
            "vllm": partial(self._vllm, stacked),
        }
        result = self._measure(case, ranks, stacked, comparators)
        added_us, base_s = result[_MODEL].get("added_us", math.nan), result["base_us"] / 1e6
        limit = goals.lora_limit_s(self._bytes(ranks), self.ceilings.copied_per_s, base_s)
        result["goals"] = {"lora_decode": goals.at_most(added_us, 1e6 * limit)}
        return result

    def prefill(self, tokens: int, ranks: Ranks) -> dict[str, Any]:
        case = self._make_case([(0, tokens // len(ranks))] * len(ranks), ranks)
        checked = self._stacked(case, [self.chain.num_layers - 1])
        result = self._measure(case, ranks, checked, {})
        share = result[_MODEL].get("added_us", math.nan) / result["base_us"]
        result["goals"] = {"lora_prefill": goals.at_most(share, goals.PREFILL_LORA_SHARE)}
        return result

    def _vllm(self, stacked: Stacked) -> Project:
        brought = vllm_lora.find()
        if brought is None:
            raise LookupError("vLLM's files are not in .bench_ref")
        return brought.system(stacked, self._sites(range(self.chain.num_layers)))

    def _measure(
        self,
        case: _Case,
        ranks: Ranks,
        stacked: Stacked,
        comparators: Mapping[str, Callable[[], Project]],
    ) -> dict[str, Any]:
        """Measure all systems. Ours come first, since a peer's kernel may break the device."""
        base_s = self._seconds(case, by_torch)
        floor_s = goals.floor_s(self._bytes(ranks), self.ceilings.copied_per_s)
        result: dict[str, Any] = {
            "base_us": rounded(1e6 * base_s),
            "floor_us": rounded(1e6 * floor_s),
        }
        expected = self._expected(case, stacked)
        for name, project in our_systems(self.machine, case.step.inputs, ops).items():
            measure = partial(self._added, case, project, expected, base_s, floor_s)
            result[name] = attempt(measure)
            if "failed" in result[name]:
                note_wrong(f"{name}: {result[name]['failed']}")
        for name, make in comparators.items():
            result[name] = attempt(
                lambda make=make: self._added(case, make(), expected, base_s, floor_s)
            )
        return result

    def _added(
        self, case: _Case, project: Project, expected: _Expected, base_s: float, floor_s: float
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
            "percent_of_floor": rounded(100 * floor_s / added_s) if added_s > 0 else None,
        }

    def _seconds(self, case: _Case, project: Project) -> float:
        work = self.chain.work(case.x, case.step.inputs, case.kv, project, ops)
        return self.machine.seconds(work)

    def _expected(self, case: _Case, stacked: Stacked) -> _Expected:
        last, step = self.chain.num_layers - 1, case.step.inputs
        wide = tuple(x.float() for x in case.x)
        return _Expected(
            torchs=self.chain.layer(last, *case.x, step, case.kv, stacked.gathered, reference),
            exact=self.chain.layer(last, *wide, step, case.kv, stacked.exact, reference),
        )

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
        slots = torch.arange(len(lengths), device=there) * len(ranks) // len(lengths)
        return _Case(
            x=self.chain.inputs(sum(count for _, count in lengths)),
            step=step,
            kv=kv.unflatten(1, layout.kv_shape),
            slots=slots.repeat_interleave(lengths[0][1]),
        )

    def _stacked(self, case: _Case, layers: Any) -> Stacked:
        arena = case.step.inputs.lora
        assert arena is not None
        slabs = arena.arena.view(torch.uint8)
        return Stacked(self.form, slabs, case.step.tables, case.slots, self._sites(layers))

    def _sites(self, layers: Any) -> list[Site]:
        return [site_of(self.machine.shape, layer, site) for layer in layers for site in SITES]

    def _bytes(self, ranks: Ranks) -> int:
        """Bytes of the distinct adapters of a step."""
        return sum(ranks) * self.form.layout.bytes_per_rank
