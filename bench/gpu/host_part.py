"""`python -m bench.gpu.host_part`: prints JSON lines with the host's time for a mixed step, no GPU.

A mixed step is 64 decodes beside a prefill of 256 tokens, in a model of 32 layers of 16 features.
All code up to the driver is the product's and Triton's own; no kernel is launched, and no graph is
captured. The step is launched alternately as the engine launches it and kernel by kernel. A model
with more than 512 features and adapters has up to four more launches per layer, which sum the
partial products of the chunks of features.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu.adapters import make_form, num_slabs
from bench.gpu.engine_model import EngineSizes, EngineUnderTest
from bench.gpu.host_device import HostDevice
from bench.gpu.machine import DryRun
from bench.gpu.steps import make_rows
from bench.report import describe_machine, json_line, ratio, rounded
from engine.batch import Batch, ScheduledRow
from lora.device import Device
from lora.layout import Layout, ModelShape
from tests.kernels.aot import launches

_DECODES, _CONTEXT, _PREFILL = 64, 1024, 256
_RANKS = (16,) * 16
_STEPS = 10
_ARCH = 90


class _Counter(TorchDispatchMode):
    """Counts the launches of torch's operations, without views and allocations."""

    num_launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        is_view = any(r.alias_info and not r.alias_info.is_write for r in returns)
        self.num_launches += not is_view and not func.__name__.startswith(("empty", "new_empty"))
        return func(*args, **(kwargs or {}))


class _Device(HostDevice):
    """A HostDevice that captures no graphs: a replay counts as one launch and does nothing."""

    def __init__(self) -> None:
        self.num_replays = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return self._replay

    def _replay(self) -> None:
        self.num_replays += 1


class _Machine(DryRun):
    dtype = torch.bfloat16
    shape = ModelShape(32, 16, 16, 2, 1, 16)

    @cached_property
    def device(self) -> Device:
        return _Device()

    def new_device(self) -> Device:
        return self.device


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.gpu.host_part", description=__doc__)
    parser.add_argument("--repeats", type=int, default=9, help="turns per variant, 10 steps each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for line in rows(options.repeats):
        sys.stdout.write(line + "\n")


def rows(repeats: int) -> Iterator[str]:
    """Yield a row without adapters, and a row with 16."""
    machine = _Machine()
    form = make_form(machine, Layout.of(machine.shape, machine.dtype.itemsize))
    sizes = EngineSizes(
        shape=machine.shape,
        max_num_seqs=_DECODES + 1,
        max_num_batched_tokens=2048,
        max_model_len=2 * _CONTEXT,
        adapter_slabs=num_slabs(form.layout, _RANKS),
        kv_blocks=form.layout.num_blocks(_CONTEXT),
    )
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        engine = EngineUnderTest(machine, sizes, "16 bits", {}, Path(folder))
        for ranks in ((), _RANKS):
            lengths = [(_CONTEXT - 1, 1)] * _DECODES + [(0, _PREFILL)]
            requests = make_rows(lengths, engine.blocks, engine.use_adapters(ranks))
            setup = {
                "model": f"{machine.shape.num_layers} layers", "decodes": _DECODES,
                "prefill_tokens": _PREFILL, "adapters": len(ranks), "repeats": repeats * _STEPS,
            }  # fmt: skip
            result = _measure(engine, machine, requests, repeats)
            yield json_line("gpu.host_part", describe_machine(), setup, result)


def _measure(
    engine: EngineUnderTest, machine: _Machine, requests: tuple[ScheduledRow, ...], repeats: int
) -> dict[str, Any]:
    """Return the `launches` of one step, and `launch_cpu_ms`, the median processor time of
    `GpuRunner.launch`, of either variant.
    """
    arms = {"engine": contextlib.nullcontext, "by_kernel": lambda: _without_graphs(engine)}
    counts, seconds = {}, {name: [] for name in arms}
    with launches(_ARCH) as launched:
        for name, arm in arms.items():
            with arm():
                engine.step(requests)  # compiles
                launched.clear()
                machine.device.num_replays = 0
                with _Counter() as counter:
                    engine.runner.launch(Batch(1, requests))
                engine.runner.collect()
                counts[name] = counter.num_launches + len(launched) + machine.device.num_replays
        for _ in range(repeats):
            for name, arm in arms.items():
                with arm():
                    seconds[name] += [_launch(engine, requests) for _ in range(_STEPS)]
    times = {name: median(of) for name, of in seconds.items()}
    figures: dict[str, Any] = {
        name: {"launches": counts[name], "launch_cpu_ms": rounded(1e3 * times[name])}
        for name in arms
    }
    return figures | {"engine_to_by_kernel": ratio(times["engine"], times["by_kernel"])}


def _launch(engine: EngineUnderTest, requests: tuple[ScheduledRow, ...]) -> float:
    """Launch a step and return its processor seconds, which other load on the machine changes less
    than wall-clock time.
    """
    start = time.thread_time()
    engine.runner.launch(Batch(1, requests))
    seconds = time.thread_time() - start
    engine.runner.collect()
    return seconds


def _without_graphs(engine: EngineUnderTest) -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(engine.runner.graphs, "find", return_value=None)


if __name__ == "__main__":
    main()
