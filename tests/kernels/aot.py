"""Kernels compiled for GPUs on a machine without one, just as their host functions launch them.

A host function of `kernels.gpu` is called with tensors in host memory. Triton finds a device of the
wanted architecture, so signature, specialisations and options are those of a real launch; nothing
is launched, and the compiled kernel is inspected. A kernel belongs to the compiler or to the
interpreter from its definition on, so the compiler runs in separate processes: `python -m
tests.kernels.aot` answers each JSON line that it reads with a JSON line.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import NamedTemporaryFile
from typing import NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

from kernels.gpu.launch import assume_capability

KIB = 1024
SHARED_LIMIT_BYTES = {
    80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB,
}  # fmt: skip
"""Most shared memory of a block, by compute capability: CUDA C++ Programming Guide, technical
specifications.
"""

_PROCESSES = 2
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
# ptxas keeps the width and kind of these instructions, so PTX is read: disassembling the output of
# ptxas takes longer than all compiling before it.
_LOAD = re.compile(r"\bld\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[bfsu](\d+)\b")
_ASYNC_LOAD = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[^;]*?\], \[[^;]*?\], (\w+)")
_BARRIER = re.compile(r"\b(?:bar\.sync|barrier\.sync)\b")
_MMA = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")
# The first list of registers of a WGMMA is its accumulator; a second list is its left operand.
_REGISTER_A_WGMMA = re.compile(r"wgmma\.mma_async[^;{]*\{[^}]*\},\s*\{")


class Task(NamedTuple):
    """A case, by its name, to be compiled with tensors of a dtype for an architecture."""

    case: str
    dtype: str
    arch: int


@dataclass(frozen=True)
class Compiled:
    """One specialisation of a kernel: its parameters, and the properties of the compiled code.

    arguments: type of each, `=value` if it is constant, `%16` if it is a known multiple of 16.
    stack_bytes: memory of values that did not fit into registers.
    mma: how many instructions of each kind.   register_a_wgmma: how many WGMMA have their left
    operand in registers.   loads: how many global loads of each size in bytes.   barriers: how
    often the warps of a program wait for each other.
    """

    kernel: str
    arguments: dict[str, str]
    num_warps: int
    num_stages: int
    grid: tuple[int, ...]
    registers: int
    shared_bytes: int
    tensor_columns: int
    stack_bytes: int
    mma: dict[str, int]
    register_a_wgmma: int
    loads: dict[int, int]
    barriers: int


class Launch(NamedTuple):
    """A kernel, compiled as it would be launched."""

    kernel: CompiledKernel
    grid: tuple[int, ...]


class CompileError(Exception):
    """A case that could not be compiled."""


Answer = list[Compiled] | CompileError


# ---- in the process that compiles ----


MULTIPROCESSORS = 132
"""Multiprocessors of every device, whatever its architecture: those of an H100."""


class _Device:
    """A Triton driver with the methods that compiling needs."""

    def __init__(self, arch: int) -> None:
        self._arch = arch
        self.utils = self  # where Triton looks for the properties

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return self._arch  # Triton keeps compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"multiprocessor_count": MULTIPROCESSORS}


@contextmanager
def launches(arch: int) -> Iterator[list[Launch]]:
    """Collect the launches on a device of this architecture, in order; nothing is launched."""
    found: list[Launch] = []

    def load(kernel: CompiledKernel) -> None:
        kernel.n_regs, _, _ = _resources(kernel.asm["cubin"])

    def launcher(kernel: CompiledKernel) -> Callable[..., None]:
        return lambda x, y, z, *_: found.append(Launch(kernel, (x, y, z)))

    driver.set_active(_Device(arch))
    with (
        mock.patch.object(CompiledKernel, "_init_handles", load),
        mock.patch.object(CompiledKernel, "run", property(launcher)),
        assume_capability(arch),
    ):
        yield found


def _inspect(launch: Launch) -> Compiled:
    kernel = launch.kernel
    registers, stack, local = _resources(kernel.asm["cubin"])
    ptx = kernel.asm["ptx"]
    return Compiled(
        kernel=kernel.src.fn.__name__,
        arguments=dict(_arguments(kernel)),
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        grid=launch.grid,
        registers=registers,
        shared_bytes=kernel.metadata.shared,
        tensor_columns=getattr(kernel.metadata, "tmem_size", None) or 0,
        stack_bytes=stack + local,
        mma=dict(Counter(_MMA.findall(ptx))),
        register_a_wgmma=len(_REGISTER_A_WGMMA.findall(ptx)),
        loads=dict(Counter(_load_sizes(ptx))),
        barriers=len(_BARRIER.findall(ptx)),
    )


def _arguments(kernel: CompiledKernel) -> Iterator[tuple[str, str]]:
    source = kernel.src
    for index, (name, kind) in enumerate(source.signature.items()):
        if (index,) in source.constants:
            yield name, f"={source.constants[index,]}"
        else:
            divides = ["tt.divisibility", 16] in source.attrs.get((index,), [])
            yield name, f"{kind}%16" if divides else kind


def _load_sizes(ptx: str) -> Iterator[int]:
    for count, bits in _LOAD.findall(ptx):
        yield int(count or 1) * int(bits) // 8
    for size in _ASYNC_LOAD.findall(ptx):
        yield int(size, 0)


@cache
def _resources(cubin: bytes) -> tuple[int, int, int]:
    """(registers, bytes of stack, bytes of local memory) of a compiled kernel."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = (str(_CUOBJDUMP), "--dump-resource-usage", file.name)
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (found,) = _RESOURCES.findall(usage)
    registers, stack, local = (int(number) for number in found)
    return registers, stack, local


def _serve(calls: Mapping[str, Callable[[torch.dtype], object]]) -> None:
    _say(triton.__version__)
    for line in sys.stdin:
        task = Task(*json.loads(line))
        answer: object
        try:
            with launches(task.arch) as found, redirect_stdout(sys.stderr):
                calls[task.case](getattr(torch, task.dtype))
            answer = [asdict(_inspect(launch)) for launch in found]
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        _say(answer)


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


# ---- in the process that asks ----


def compile_tasks(
    tasks: Iterable[Task], cache_dir: Path, other_triton: Path | None = None
) -> dict[Task, Answer]:
    """Compile the kernels that each task launches. Compiled kernels are kept in `cache_dir`.

    other_triton: folder `triton-VERSION` with a Triton that compiles in place of the installed one.
    """
    waiting: SimpleQueue[Task] = SimpleQueue()
    for task in tasks:
        waiting.put(task)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache_dir)}
    version = version_of(other_triton)
    if other_triton is not None:
        paths = str(other_triton.absolute()), env.get("PYTHONPATH", "")
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with ThreadPoolExecutor(_PROCESSES) as pool:
        parts = [pool.submit(_work_off, waiting, env, version) for _ in range(_PROCESSES)]
    return {task: answer for part in parts for task, answer in part.result()}


def version_of(other_triton: Path | None) -> str:
    """The version of the Triton in a folder `triton-VERSION`, or of the installed one."""
    if other_triton is None:
        return triton.__version__
    return other_triton.name.removeprefix("triton-")


def _work_off(
    waiting: "SimpleQueue[Task]", env: Mapping[str, str], version: str
) -> list[tuple[Task, Answer]]:
    answers: list[tuple[Task, Answer]] = []
    while not waiting.empty():
        with _start(env, version) as process:
            for task in _drain(waiting):
                answer = _ask(process, task)
                answers.append((task, _read(answer)))
                if not answer:
                    break
            assert process.stdin is not None
            process.stdin.close()
    return answers


def _start(env: Mapping[str, str], version: str) -> "subprocess.Popen[str]":
    command, pipe = (sys.executable, "-m", "tests.kernels.aot"), subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env, text=True)
    assert process.stdout is not None
    found = process.stdout.readline()
    if not found:
        raise RuntimeError(f"no compiling process, it returned {process.wait()}")
    assert json.loads(found) == version, f"Triton is {found}"
    return process


def _drain(waiting: "SimpleQueue[Task]") -> Iterator[Task]:
    while True:
        try:
            yield waiting.get_nowait()
        except Empty:
            return


def _ask(process: "subprocess.Popen[str]", task: Task) -> str:
    """The line that the process answers, or an empty one if the process dies."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(task) + "\n")
    process.stdin.flush()
    return process.stdout.readline()


def _read(line: str) -> Answer:
    answer = json.loads(line) if line else "The compiler's process has died."
    if isinstance(answer, str):
        return CompileError(answer)
    found = []
    for fields in answer:
        loads = {int(size): count for size, count in fields.pop("loads").items()}
        grid = tuple(fields.pop("grid"))
        found.append(Compiled(**fields, loads=loads, grid=grid))
    return found


if __name__ == "__main__":
    from tests.kernels.aot_cases import CASES, ODD_STEPS
    from tests.kernels.aot_toys import TOYS

    _serve({case.name: case.call for case in (*CASES, *chain(*ODD_STEPS.values()))} | TOYS)
