"""Every kernel, compiled as it is launched, fits, spills nothing, uses wide loads, and has no
instruction that is known to be miscompiled. Persistent ones have as many programs as fit.

They are compiled for sm_90 by the Triton of GPU machines, which `make test` brings beside the
installed one; `make soak` compiles everything for every architecture by the installed one.
"""

import ast
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

import kernels.gpu
from tests import needs
from tests.kernels.aot import (
    MULTIPROCESSORS,
    SHARED_LIMIT_BYTES,
    Answer,
    Compiled,
    CompileError,
    Task,
    compile_tasks,
    version_of,
)
from tests.kernels.aot_cases import CASES, LARGE, ODD_STEPS, SHARDS
from tests.kernels.aot_table import resident, table, tasks_of
from tests.kernels.aot_toys import TOYS

pytestmark = pytest.mark.timeout(900)

ARCHS = tuple(SHARED_LIMIT_BYTES)
GPU_ARCH = 90
GPU_TRITON = os.environ.get("GPU_TRITON")
"""The folder of the Triton that torch on a GPU machine comes with: `.venv/triton-VERSION`."""

CACHE = Path(__file__).parents[2] / "build" / "triton"
"""Compiled kernels are kept here, so that a second run compiles only what is new."""
CACHE_LIMIT_BYTES = 1 << 30
"""Limit of all versions of the kernels that were compiled here; a run takes 0.1 GB."""

GPU_KERNELS = Path(kernels.gpu.__path__[0])
TENSOR_COLUMNS = 512
GRID_LIMITS = (2**31 - 1, 65535, 65535)

HEAVY = frozenset(
    {
        "_copy_kernel",
        "_decode_kernel",
        "_dequantize",
        "_expand",
        "_multiply",
        "_multiply_tile",
        "_prefill_kernel",
        "_rope_store_kv",
        "_shrink",
        "_gated_product_expand",
    }
)
"""Kernels that spend their time on reading tiles, KV, slabs or weights, by loads of 16 bytes."""

NARROW_SHARE = 0.35
"""Largest share of a heavy kernel's bytes that it may load fewer than 8 at a time. Work lists,
tables and scales take less; elements that are wrongly loaded in pairs would take more.
"""

Results = dict[Task, Answer]


@pytest.fixture(scope="session")
def gpus_triton() -> Path | None:
    """The folder of the Triton of GPU machines; without one, the installed Triton compiles."""
    if GPU_TRITON:
        return Path(GPU_TRITON)
    if os.environ.get("TESTS_IN_CI"):
        needs.missing("Triton of GPU machines", "`make test` brings it and names its folder.")
    return None


@pytest.fixture(scope="session")
def compiled_all(gpus_triton: Path | None) -> Results:
    """All kernels of the models and of their shards, those of odd steps, and toys."""
    cases = [*CASES, *chain(*ODD_STEPS.values())]
    toys = [Task(name, "bfloat16", GPU_ARCH) for name in TOYS]
    return compile_tasks(tasks_of(cases, "bfloat16", (GPU_ARCH,)) + toys, cache(), gpus_triton)


@pytest.fixture(scope="session")
def results(compiled_all: Results) -> Results:
    names = {case.name for case in CASES}
    return {task: found for task, found in compiled_all.items() if task.case in names}


def cache() -> Path:
    """The folder of compiled kernels, emptied if it holds too many."""
    if sum(path.stat().st_size for path in CACHE.glob("*/*")) > CACHE_LIMIT_BYTES:
        shutil.rmtree(CACHE)
    CACHE.mkdir(parents=True, exist_ok=True)
    return CACHE


# ---- the kernels ----


def test_every_kernel_fits_a_hopper(results: Results, gpus_triton: Path | None) -> None:
    sys.stdout.write(table(results, version_of(gpus_triton)))
    found = all_defects(results)
    assert not found, "\n".join(found)


def test_persistent_kernels_have_as_many_programs_as_fit(
    results: Results,
) -> None:
    names = looping_kernels(GPU_KERNELS)
    looping = [found for found in compiled_in(results) if found[1].kernel in names]
    assert {kernel.kernel for _, kernel in looping} == names
    for task, kernel in looping:
        held = resident(kernel, task.arch)
        assert kernel.grid == (held * MULTIPROCESSORS, 1, 1), (task, kernel.kernel)


def test_the_planes_of_an_expand_are_summed_before_they_change_their_layout(
    results: Results,
) -> None:
    # Otherwise every plane passes through shared memory, and the next is loaded when it is there.
    barriers = {
        (kernel.arguments["NUM_PLANES"], kernel.barriers)
        for task, kernel in compiled_in(results)
        if task.case.startswith("8b expand decode") and kernel.kernel == "_expand"
    }
    assert {planes for planes, _ in barriers} == {"=8", "=28"}
    assert len({number for _, number in barriers}) == 1


@pytest.mark.soak
def test_every_kernel_fits_for_every_architecture_model_and_dtype() -> None:
    tasks = tasks_of(CASES, "bfloat16", ARCHS) + tasks_of(CASES, "float16", ARCHS)
    results = compile_tasks(tasks, cache())
    sys.stdout.write(table(results))
    found = all_defects(results)
    assert not found, "\n".join(found)


def test_every_kernel_that_is_launched_occurs_in_a_case(results: Results) -> None:
    names = {kernel.kernel for _, kernel in compiled_in(results)}
    assert launched_kernels(GPU_KERNELS) == names
    assert names >= HEAVY


def test_kernels_know_that_work_lists_of_adapters_may_be_read_wide(results: Results) -> None:
    lists = [
        kernel.arguments[name]
        for _, kernel in compiled_in(results)
        for name in ("blocks", "pairs")
        if "line" in kernel.arguments and name in kernel.arguments
    ]
    assert set(lists) == {"*i32%16", "=None"}, "None is of a rope_store_kv without adapters"


def test_a_step_of_any_number_of_decodes_takes_the_same_kernels(
    compiled_all: Results,
) -> None:
    # Otherwise capturing a graph of another size would wait for the compiler.
    for cases in ODD_STEPS.values():
        for case, usual in zip(cases, LARGE, strict=False):
            ours, other = (Task(each.name, "bfloat16", GPU_ARCH) for each in (case, usual))
            assert without_grids(compiled_all[ours]) == without_grids(compiled_all[other]), ours


# ---- finding defects ----


def test_a_sound_kernel_has_no_defect(compiled_all: Results) -> None:
    (kernel,) = compiled(compiled_all, "fits")
    assert defects(kernel, 90) == []
    assert kernel.mma == {"wgmma.mma_async": 4}
    assert kernel.num_warps == 4
    assert kernel.num_stages == 3


@pytest.mark.parametrize(
    ("name", "arch", "defect"),
    [
        ("spills", 90, "spills"),
        ("wants much shared memory", 120, "shared memory"),
        ("keeps a left operand in registers", 90, "left operand in registers"),
        ("launches too many", 90, "grid"),
    ],
)
def test_a_defect_is_found(compiled_all: Results, name: str, arch: int, defect: str) -> None:
    (kernel,) = compiled(compiled_all, name)
    (found,) = defects(kernel, arch)
    assert defect in found


def test_wide_loads_are_told_from_narrow_ones(compiled_all: Results) -> None:
    (wide,), (narrow,) = (
        compiled(compiled_all, "fits"),
        compiled(compiled_all, "loads in small pieces"),
    )
    assert reads_wide(wide.loads)
    assert set(narrow.loads) == {2}
    assert not reads_wide(narrow.loads)
    assert not reads_wide({16: 90, 2: 1})
    assert not reads_wide({16: 2, 4: 8})
    assert reads_wide({16: 4, 8: 9, 4: 8})


# ---- defects of a kernel ----


def defects(kernel: Compiled, arch: int) -> list[str]:
    found = []
    if kernel.stack_bytes:
        found.append(f"spills {kernel.stack_bytes} bytes")
    if kernel.shared_bytes > SHARED_LIMIT_BYTES[arch]:
        found.append(f"wants {kernel.shared_bytes} bytes of shared memory")
    if kernel.tensor_columns > TENSOR_COLUMNS:
        found.append(f"wants {kernel.tensor_columns} columns of tensor memory")
    if kernel.register_a_wgmma:  # ptxas before 13.3 miscompiles pipelined ones
        found.append(f"{kernel.register_a_wgmma} WGMMA with their left operand in registers")
    if any(size > limit for size, limit in zip(kernel.grid, GRID_LIMITS, strict=False)):
        found.append(f"grid {kernel.grid}")
    return found


def reads_wide(loads: Mapping[int, int]) -> bool:
    """Whether loads are wide enough; loads of single elements never are.

    loads: how many of each size in bytes.
    """
    total = sum(size * count for size, count in loads.items())
    narrow = sum(size * count for size, count in loads.items() if size < 8)
    return 16 in loads and min(loads) >= 4 and narrow <= NARROW_SHARE * total


def all_defects(results: Mapping[Task, Answer]) -> list[str]:
    # A small model's heads are too short for every thread to load 16 bytes.
    large = {case.name for case in (*LARGE, *SHARDS)}
    lines = [f"{task}: {found}" for task, found in results.items() if isinstance(found, Exception)]
    for task, kernel in compiled_in(results):
        found = defects(kernel, task.arch)
        if kernel.kernel in HEAVY and task.case in large and not reads_wide(kernel.loads):
            found.append(f"narrow loads, {kernel.loads}")
        lines += [f"{task}: {kernel.kernel} {defect}" for defect in found]
    return lines


def looping_kernels(folder: Path) -> set[str]:
    """Kernels of all modules in a folder whose programs take one item after another."""
    items = re.compile(r"range\(tl\.program_id\(0\), .*tl\.num_programs\(0\)\)")
    return {function.name for function in _kernels(folder) if items.search(ast.unparse(function))}


def launched_kernels(folder: Path) -> set[str]:
    """Kernels of all modules in a folder that no other kernel calls."""
    functions = _kernels(folder)
    called = {
        name.id
        for function in functions
        for name in ast.walk(function)
        if isinstance(name, ast.Name)
    }
    return {function.name for function in functions} - called


def _kernels(folder: Path) -> list[ast.FunctionDef]:
    trees = [ast.parse(path.read_text()) for path in folder.glob("*.py")]
    return [
        node
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


# ---- results ----


def compiled_in(results: Mapping[Task, Answer]) -> list[tuple[Task, Compiled]]:
    return [
        (task, kernel)
        for task, found in results.items()
        if not isinstance(found, CompileError)
        for kernel in found
    ]


def compiled(results: Results, toy: str) -> list[Compiled]:
    found = results[Task(toy, "bfloat16", 90)]
    assert not isinstance(found, CompileError), found
    return found


def without_grids(found: Answer) -> list[Compiled]:
    assert not isinstance(found, CompileError), found
    return [replace(kernel, grid=()) for kernel in found]
