"""`python -m tests.gpu.compiling`: compiles the kernels that checks and benchmarks launch here.

Host functions are called with tensors in host memory, as in `tests.kernels.aot`, by many processes
side by side. Compiled kernels go to Triton's cache, where every later process finds them; a kernel
that is missing here is compiled by the check that launches it. Triton 3.6 besides runs the C
compiler at the first launch of a kernel, once for each signature; its launchers are made here, too.
"""

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from triton.backends.nvidia import driver

from bench.child import run_all
from bench.gpu.host_device import HostDevice
from bench.gpu.probe import NoGpu, probe
from kernels.gpu import ops
from lora.layout import ModelShape
from tests.engine.churn import CONFIG
from tests.gpu.agreement import GROUPS, Trials
from tests.gpu.models import FAMILIES
from tests.gpu.setting import DTYPES_ON_GPU, KERNELS_ON_GPU, MODELS_ON_GPU, Setting
from tests.gpu.trials.trial import CPU
from tests.kernels.aot import Launch, launches
from tests.kernels.aot_cases import COPY_SLABS, LLAMA_8B, Case, cases_of

_TIMEOUT_S = 240.0
_LAYERS = 4
"""Number of layers of the cases, which need a few; no kernel depends on it."""

_CHECKED = ModelShape(
    _LAYERS, MODELS_ON_GPU.hidden, MODELS_ON_GPU.intermediate, MODELS_ON_GPU.heads,
    MODELS_ON_GPU.kv_heads, MODELS_ON_GPU.head_dim,
)  # fmt: skip
_MODELS = {
    LLAMA_8B: 0,
    _CHECKED: FAMILIES["mistral"]["sliding_window"],
    replace(CONFIG.shape, num_layers=_LAYERS): 0,
}
"""Models that are run, and the sliding window of some of their layers; 0 for none."""


def main() -> int:
    """Compile all known kernels, with one process per processor."""
    start, at_once = time.monotonic(), os.cpu_count() or 1
    try:
        found = probe()
    except NoGpu as error:
        sys.exit(str(error))
    sys.stdout.write(f"{found}\n")
    cases, failed = [COPY_SLABS, *_cases()], []
    works = {
        **{f"kernels.{name}": partial(_record, of, found.arch) for name, of in GROUPS.items()},
        **{f"models {i}": partial(_compile, cases[i::at_once], found.arch) for i in range(at_once)},
    }
    for name, ended in run_all(works.items(), at_once, _TIMEOUT_S):
        if ended.failure is not None:
            failed.append(name)
            sys.stdout.write(f"compiling {name}  FAILED  {ended.failure}\n{ended.said}\n")
    sys.stdout.write(f"kernels compiled in {time.monotonic() - start:.1f} s\n")
    return int(bool(failed))


def _cases() -> Iterator[Case]:
    for shape, window in _MODELS.items():
        yield from cases_of("", shape, window=window)


def _compile(cases: list[Case], arch: int) -> None:
    for case in cases:
        if arch >= case.min_arch:
            with launches(arch) as found:
                case.call(torch.bfloat16)
            make_launchers(found)


def _record(trials: Trials, arch: int) -> None:
    """Compile the kernels that trials launch on a GPU; nothing is launched or judged."""
    setting = Setting(HostDevice(), 0, DTYPES_ON_GPU, KERNELS_ON_GPU, MODELS_ON_GPU)
    with launches(arch) as found, mock.patch.object(torch, "_scaled_mm", _empty_product):
        for trial in trials(setting):
            trial.run(ops, CPU)
    make_launchers(found)


def _empty_product(
    x: torch.Tensor, y: torch.Tensor, *, out_dtype: torch.dtype, **_: object
) -> torch.Tensor:
    """Make room for a product that not every torch has on a CPU."""
    return x.new_empty(len(x), y.shape[1], dtype=out_dtype)


def make_launchers(found: list[Launch]) -> None:
    """Compile the C code that launches these kernels, into Triton's cache. Triton 3.7 has none."""
    if hasattr(driver, "make_launcher"):
        for kernel, _ in found:
            driver.CudaLauncher(kernel.src, kernel.metadata)


if __name__ == "__main__":
    sys.exit(main())
