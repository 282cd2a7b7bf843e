"""`python -m tests.kernels.aot_table`: prints what every kernel takes of a multiprocessor, and how
many programs of it fit there and are launched, for GPUs of three kinds.

It compiles by the installed Triton, and by the one whose folder `GPU_TRITON` names.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

import triton

from kernels.gpu.launch import resident_programs
from tests.kernels.aot import (
    MULTIPROCESSORS,
    Answer,
    Compiled,
    CompileError,
    Task,
    compile_tasks,
    version_of,
)
from tests.kernels.aot_cases import CASES, Case

_ARCHS = (80, 90, 100)
_CACHE = Path(__file__).parents[2] / "build" / "triton"


def main() -> None:
    named = os.environ.get("GPU_TRITON")
    for other in (Path(named), None) if named else (None,):
        results = compile_tasks(tasks_of(CASES, "bfloat16", _ARCHS), _CACHE, other)
        sys.stdout.write(table(results, version_of(other)))


def tasks_of(cases: Iterable[Case], dtype: str, archs: Iterable[int]) -> list[Task]:
    return [
        Task(case.name, dtype, arch) for arch in archs for case in cases if arch >= case.min_arch
    ]


def resident(kernel: Compiled, arch: int) -> int:
    """Number of programs of the kernel that a multiprocessor holds at once."""
    return resident_programs(
        arch, kernel.num_warps, kernel.registers, kernel.shared_bytes, kernel.tensor_columns
    )


def table(results: Mapping[Task, Answer], version: str = triton.__version__) -> str:
    """A table with one line per launch; `launched` is the number of programs per multiprocessor."""
    lines = [
        f"{kernel.kernel:<22} {task.case:<36} {task.dtype:<9}{task.arch:>4} {version:<7}"
        f"{kernel.num_warps:>6}{kernel.num_stages:>7}{kernel.registers:>10}"
        f"{kernel.stack_bytes:>8}{kernel.shared_bytes:>7}{resident(kernel, task.arch):>9}"
        f"{prod(kernel.grid) / MULTIPROCESSORS:>9.3g}"
        f"  {dict(sorted(kernel.loads.items()))} {kernel.mma}"
        for task, found in sorted(results.items())
        if not isinstance(found, CompileError)
        for kernel in found
    ]
    head = (
        f"{'kernel':<22} {'case':<36} {'dtype':<9}{'arch':>4} {'triton':<7}{'warps':>6}"
        f"{'stages':>7}{'registers':>10}{'spilled':>8}{'shared':>7}{'resident':>9}{'launched':>9}"
        "  loads, mma"
    )
    return "\n".join(["", head, *lines, ""])


if __name__ == "__main__":
    main()
