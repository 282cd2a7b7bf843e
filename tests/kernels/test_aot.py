"""Every kernel, compiled for every architecture that it is meant for, fits, spills nothing, uses
wide loads, and has no instruction that is known to be miscompiled.
"""

import ast
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import kernels.gpu
from tests.kernels.aot import (
    EXPECTED_TRITON,
    SHARED_LIMIT_BYTES,
    Answer,
    Compiled,
    CompileError,
    Task,
    compile_tasks,
)
from tests.kernels.aot_cases import CASES, LARGE, ODD_STEPS, SHARDS, Case
from tests.kernels.aot_toys import TOYS

pytestmark = pytest.mark.timeout(900)

ARCHS = tuple(SHARED_LIMIT_BYTES)
CACHE_LIMIT_BYTES = 1 << 30
"""Limit of all versions of the kernels that were compiled here; a run takes 0.15 GB."""

TENSOR_COLUMNS = 512
GRID_LIMITS = (2**31 - 1, 65535, 65535)

HEAVY = frozenset(
    {
        "_copy_kernel",
        "_decode_kernel",
        "_expand",
        "_prefill_kernel",
        "_rope_store_kv",
        "_shrink",
        "_gated_product_expand",
    }
)
"""Kernels that spend their time on reading tiles, KV or slabs, by loads of 16 bytes. `_multiply`
has a test of its own, since Triton loads its codes by 8 bytes for few tokens.
"""

TWINS = {86: 80, 89: 80}
"""Architectures for which Triton generates the same code as for an older one, and the older one.
They have less shared memory. Attention takes that into account when it is launched, so it is
compiled for each of them; all other kernels are compiled for the older one and checked against the
limits of both. `make soak` compiles everything.
"""

BY_NAME = {case.name: case for case in CASES}

NARROW_SHARE = 0.3
"""Largest share of a heavy kernel's bytes that it may load fewer than 8 at a time. Work lists and
tables take less; elements that are wrongly loaded in pairs would take more.
"""

REGISTER_A_WGMMA_ALLOWED: dict[str, str] = {}
"""Kernels that may have a WGMMA whose left operand is in registers, and why: ptxas before 13.3
miscompiles pipelined ones.
"""

Results = dict[Task, Answer]
Compile = Callable[[Iterable[Task]], Results]


@pytest.fixture(scope="session")
def compile_all(request: pytest.FixtureRequest) -> Compile:
    """Compile tasks, with a cache among pytest's own, so that a second run finds the kernels."""
    assert request.config.cache is not None
    cache_dir = Path(request.config.cache.mkdir("triton"))
    if sum(path.stat().st_size for path in cache_dir.glob("*/*")) > CACHE_LIMIT_BYTES:
        shutil.rmtree(cache_dir)
    return lambda tasks: compile_tasks(tasks, cache_dir)


@pytest.fixture(scope="session")
def results(compile_all: Compile) -> Results:
    """The large model's kernels for every architecture. The rest is compiled by other tests for few
    architectures, and by `make soak` for all.
    """
    own = tasks_of([case for case in LARGE if has_own_code(case)], "bfloat16", TWINS)
    others = [arch for arch in ARCHS if arch not in TWINS]
    return compile_all(
        own + tasks_of(LARGE, "bfloat16", others) + tasks_of(LARGE, "float16", (80,))
    )


@pytest.fixture(scope="session")
def toys(compile_all: Compile) -> Results:
    return compile_all([Task(name, "bfloat16", 90) for name in TOYS])


def tasks_of(cases: Iterable[Case], dtype: str, archs: Iterable[int]) -> list[Task]:
    return [
        Task(case.name, dtype, arch) for arch in archs for case in cases if arch >= case.min_arch
    ]


def has_own_code(case: Case) -> bool:
    """Whether an architecture of TWINS is given other kernels than its older one."""
    return "attention" in case.name or case.min_arch > min(ARCHS)


# ---- the kernels ----


def test_every_kernel_fits_every_architecture(results: Results) -> None:
    sys.stdout.write(table(results))
    found = all_defects(results)
    assert not found, "\n".join(found)


@pytest.mark.skipif(not EXPECTED_TRITON, reason="make test-triton brings another Triton")
def test_every_kernel_fits_a_hopper_by_another_triton(compile_all: Compile) -> None:
    results = compile_all(tasks_of(LARGE, "bfloat16", (90,)))
    sys.stdout.write(table(results))
    found = all_defects(results)
    assert not found, "\n".join(found)


def test_every_kernel_fits_on_ranks_of_a_sharded_model(compile_all: Compile) -> None:
    results = compile_all(tasks_of(SHARDS, "bfloat16", (80, 120)))
    sys.stdout.write(table(results))
    found = all_defects(results)
    assert not found, "\n".join(found)


@pytest.mark.soak
def test_every_kernel_fits_for_either_model_and_dtype(compile_all: Compile) -> None:
    tasks = tasks_of(CASES, "bfloat16", ARCHS) + tasks_of(CASES, "float16", ARCHS)
    results = compile_all(tasks)
    sys.stdout.write(table(results))
    found = all_defects(results)
    assert not found, "\n".join(found)


def test_every_kernel_that_is_launched_occurs_in_a_case(results: Results) -> None:
    names = {kernel.kernel for _, kernel in compiled_in(results)}
    assert launched_kernels(Path(kernels.gpu.__path__[0])) == names
    assert names >= HEAVY


def test_weights_in_few_bits_are_read_by_8_bytes_or_more(results: Results) -> None:
    # Scales and zeros, a number for each thread, are the rest.
    for task, kernel in compiled_in(results):
        if kernel.kernel == "_multiply":
            sizes = [size for size, count in kernel.loads.items() for _ in range(count)]
            assert min(sizes) >= 4, task
            assert sum(size for size in sizes if size < 8) <= NARROW_SHARE * sum(sizes), task


def test_kernels_know_that_work_lists_of_adapters_may_be_read_wide(results: Results) -> None:
    lists = [
        kernel.arguments[name]
        for _, kernel in compiled_in(results)
        for name in ("blocks", "pairs")
        if "line" in kernel.arguments and name in kernel.arguments
    ]
    assert set(lists) == {"*i32%16", "=None"}, "None is of a rope_store_kv without adapters"


def test_a_step_of_any_number_of_decodes_takes_the_same_kernels(
    results: Results, compile_all: Compile
) -> None:
    # Otherwise capturing a graph of another size would wait for the compiler.
    for cases in ODD_STEPS.values():
        odd = compile_all(tasks_of(cases, "bfloat16", (90,)))
        for case, usual in zip(cases, LARGE, strict=False):
            ours = without_grids(odd[Task(case.name, "bfloat16", 90)])
            assert ours == without_grids(results[Task(usual.name, "bfloat16", 90)]), case.name


# ---- finding defects ----


def test_a_sound_kernel_has_no_defect(toys: Results) -> None:
    (kernel,) = compiled(toys, "fits")
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
def test_a_defect_is_found(toys: Results, name: str, arch: int, defect: str) -> None:
    (kernel,) = compiled(toys, name)
    (found,) = defects(kernel, arch)
    assert defect in found


def test_wide_loads_are_told_from_narrow_ones(toys: Results) -> None:
    (wide,), (narrow,) = compiled(toys, "fits"), compiled(toys, "loads in small pieces")
    assert reads_wide(wide.loads)
    assert set(narrow.loads) == {2}
    assert not reads_wide(narrow.loads)
    assert not reads_wide({16: 90, 2: 1})
    assert not reads_wide({16: 2, 4: 8})
    assert reads_wide({16: 4, 8: 9, 4: 8})


def test_what_does_not_compile_is_an_error_and_the_others_go_on(toys: Results) -> None:
    errors = {task: found for task, found in toys.items() if isinstance(found, CompileError)}
    assert {task.case for task in errors} == {"does not compile", "kills the compiler"}
    assert "K >= 16" in str(errors[Task("does not compile", "bfloat16", 90)])
    assert "died" in str(errors[Task("kills the compiler", "bfloat16", 90)])
    assert len(all_defects(errors)) == 2
    assert len(toys) == len(TOYS)


def test_a_kernel_is_compiled_for_the_arguments_of_its_launch(toys: Results) -> None:
    first, second = compiled(toys, "specialises")
    size = {"SIZE": "=1024"}
    aligned, other = "*bf16%16", "*bf16"
    assert first.arguments == {
        "target": aligned, "source": other, "step": "=1", "free": "i32", **size
    }  # fmt: skip
    assert second.arguments == {
        "target": aligned, "source": aligned, "step": "i32%16", "free": "i32", **size
    }  # fmt: skip
    assert first.grid == (3, 2)


def test_kernels_that_others_call_are_not_launched(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text(
        "@triton.jit\ndef _called(x):\n    pass\n"
        "@triton.jit(do_not_specialize=['x'])\ndef _launched(x):\n    _called(x)\n"
        "def host(x):\n    _launched[(1,)](x)\n"
    )
    assert launched_kernels(tmp_path) == {"_launched"}


# ---- defects of a kernel ----


def defects(kernel: Compiled, arch: int) -> list[str]:
    found = []
    if kernel.stack_bytes:
        found.append(f"spills {kernel.stack_bytes} bytes")
    if kernel.shared_bytes > SHARED_LIMIT_BYTES[arch]:
        found.append(f"wants {kernel.shared_bytes} bytes of shared memory")
    if kernel.tensor_columns > TENSOR_COLUMNS:
        found.append(f"wants {kernel.tensor_columns} columns of tensor memory")
    if kernel.register_a_wgmma and kernel.kernel not in REGISTER_A_WGMMA_ALLOWED:
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
        for twin in (arch for arch, older in TWINS.items() if older == task.arch):
            if not has_own_code(BY_NAME[task.case]):
                found += [f"{defect} on sm_{twin}" for defect in defects(kernel, twin)]
        if kernel.kernel in HEAVY and task.case in large and not reads_wide(kernel.loads):
            found.append(f"narrow loads, {kernel.loads}")
        lines += [f"{task}: {kernel.kernel} {defect}" for defect in found]
    return lines


def launched_kernels(folder: Path) -> set[str]:
    """Kernels of all modules in a folder that no other kernel calls."""
    trees = [ast.parse(path.read_text()) for path in folder.glob("*.py")]
    functions = [
        node
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    called = {
        name.id
        for function in functions
        for name in ast.walk(function)
        if isinstance(name, ast.Name)
    }
    return {function.name for function in functions} - called


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


def table(results: Results) -> str:
    """A table with one line per kernel and architecture."""
    lines = [
        f"{task.arch:>4} {task.dtype:<9} {task.case:<32} {kernel.kernel:<24}"
        f" warps {kernel.num_warps} stages {kernel.num_stages} registers {kernel.registers:>3}"
        f" shared {kernel.shared_bytes:>6} spilled {kernel.stack_bytes}"
        f" loads {dict(sorted(kernel.loads.items()))} {kernel.mma}"
        for task, kernel in sorted(compiled_in(results), key=lambda pair: pair[0])
    ]
    return "\n".join(["", *lines, ""])
