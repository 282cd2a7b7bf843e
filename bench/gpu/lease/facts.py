"""Facts about a machine with a GPU, and tests that it does what the engine takes for granted."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

import numpy
import torch
import triton

from bench.gpu.check import check_equal, describe
from bench.gpu.machine import DryRun, Gpu, Machine
from kernels.gpu import ops

_COMMANDS = {
    "GPU": (
        "nvidia-smi", "--format=csv,noheader",
        "--query-gpu=name,driver_version,memory.total,power.limit,clocks.sm,clocks.max.sm",
    ),
    "gcc": ("gcc", "-dumpfullversion"),
    "ptxas of the machine": ("/usr/local/cuda/bin/ptxas", "--version"),
    "sanitizer": ("compute-sanitizer", "--version"),
}  # fmt: skip
_SLAB_BYTES = 2 << 20


def show_facts(is_dry: bool) -> None:
    """Print a line for each fact. Raises AssertionError if the machine cannot do something."""
    machine = DryRun() if is_dry else Gpu()
    facts: dict[str, Callable[[], str]] = {
        "versions": _versions,
        **{name: lambda command=command: _output(*command) for name, command in _COMMANDS.items()},
        "memory": lambda: _memory(machine),
        "pinned": lambda: _pin(machine),
        "kernel on pinned memory": lambda: _read_pinned(machine),
        "capture on two streams": lambda: _capture(machine),
    }
    failed = []
    for name, find in facts.items():
        try:
            value = find()
        except Exception as error:
            failed.append(name)
            value = f"FAILED, {describe(error)}"
        sys.stdout.write(f"{name}: {value}\n")
    assert not failed, f"failed: {', '.join(failed)}"


def _versions() -> str:
    modules = (torch, triton, numpy)
    named = [f"{module.__name__} {module.__version__}" for module in modules]
    return ", ".join([f"python {sys.version.split()[0]}", *named, f"{os.cpu_count()} processors"])


def _output(*command: str) -> str:
    """Return the last line that a command prints."""
    if shutil.which(command[0]) is None:
        return "not here"
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return (done.stdout + done.stderr).strip().rpartition("\n")[2]


def _memory(machine: Machine) -> str:
    free, total = machine.memory_bytes
    shared = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    sizes = {"device, free": free, "device": total, "host": host, "/dev/shm, free": shared}
    return ", ".join(f"{name} {size / (1 << 30):.1f} GiB" for name, size in sizes.items())


def _pin(machine: Machine) -> str:
    size_bytes = machine.pick(1 << 30, 1 << 16)
    start_s = time.perf_counter()
    machine.device.pinned(size_bytes, dtype=torch.uint8)
    return f"{size_bytes / (1 << 30):.2g} GiB in {time.perf_counter() - start_s:.3f} s"


def _read_pinned(machine: Machine) -> str:
    """Copy slabs from pinned memory by the kernel that the engine's swap uses."""
    shape = machine.pick((128, _SLAB_BYTES), (2, 1024))
    host = machine.device.pinned(*shape, dtype=torch.uint8).random_()
    target = torch.zeros(shape, dtype=torch.uint8, device=machine.there)
    ids = torch.arange(len(host), dtype=torch.int32, device=machine.there)

    def copy() -> None:
        ops.copy_slabs(target, ids, host, ids)

    machine.run(copy)
    check_equal("bytes", target.cpu(), host)
    return f"{host.nbytes / machine.seconds(copy) / 1e9:.1f} GB/s"


def _capture(machine: Machine) -> str:
    device = machine.device
    here, beside = torch.zeros(2, 1024, device=machine.there).unbind()

    def work() -> None:
        join = device.beside(lambda: beside.add_(1))
        here.add_(1)
        join()

    replay = device.capture(work)
    device.submit(device.compute, replay)
    device.synchronize(device.record(device.compute))
    for numbers in (here, beside):
        check_equal("numbers after a run and a replay", numbers, torch.full_like(numbers, 2))
    return "ok"
