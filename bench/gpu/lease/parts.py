"""Parts of a command: each has a limit and a process group, and leaves a closing line."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from glob import glob
from typing import Any

from bench import child
from bench.gpu import command
from bench.gpu.lease import facts
from bench.gpu.lease.lease import Lease
from bench.gpu.lease.pack import FOLDER

_LEAST_S = 1.0
_CHECKS_FIRST = (
    "graphs.first", "whole_numbers.", "kernels.", "models.llama", "models.qwen3",
    "models.quantized",
)  # fmt: skip
_CHECKS_LAST = ("graphs.replays", "engine.cold_loads")
_OF_KERNELS = ("kernels.", "whole_numbers.")


@dataclass(frozen=True)
class Part:
    """A piece of a command's work.

    until_s: when it is killed, in seconds from the start of the command; it begins as soon as the
    part before it has ended.
    """

    name: str
    until_s: float
    work: Callable[[], object]


def run_parts(parts: Sequence[Part], lease: Lease, start_s: float) -> bool:
    """Run the parts in order, and return whether all are ok.   start_s: on the monotonic clock."""
    hows = []
    for part in parts:
        num_noted = len(lease.entries(lease.command))
        limit_s = max(_LEAST_S, start_s + lease.limit_s(part.until_s) - time.monotonic())
        with lease.log_path.open("a") as log:
            log.write(f"\n--- {part.name}: at most {limit_s:.0f} s ---\n")
            log.flush()
            ended = child.run(part.work, limit_s, log)
        noted = lease.entries(lease.command)[num_noted:]
        lease.note(part=part.name, ended=ended.how, seconds=round(ended.seconds, 1))
        lease.say(f"{part.name}  {ended.how}  {ended.seconds:.1f} s")
        for entry in noted:
            if entry["ended"] != "ok":
                lease.say(f"    {entry['check']}  {entry['ended']}")
        hows.append(ended.how)
    return set(hows) <= {"ok"}


def first_parts(lease: Lease) -> list[Part]:
    """The parts of the first command, the most informative first."""
    compiling = partial(child.run_module, "tests.gpu.compiling")
    return [
        Part("facts", 20, partial(facts.show_facts, lease.is_dry)),
        *([] if lease.is_dry else [Part("compile", 50, compiling)]),
        Part("checks", 190, partial(_check, lease, lease.seed, _CHECKS_FIRST)),
        Part("engine", 270, partial(_measure, lease, "engine")),
        Part("overlap", 315, partial(_measure, lease, "engine", lora_overlap="none")),
        Part("attention", 345, partial(_measure, lease, "attention")),
        Part("kernels", 370, partial(_measure, lease, "kernels")),
        Part("long checks", 410, partial(_check, lease, lease.seed, _CHECKS_LAST)),
    ]


def second_parts(lease: Lease) -> Iterator[Part]:
    """The parts of the second command, chosen by what the first one has found."""
    entries = lease.entries("first")
    if failed := failed_kernels(entries):
        lease.say(f"{len(failed)} checks of kernels have failed: other compilers are tried")
        seed = entries[0]["seed"]
        for number, (name, path) in enumerate(find_ptxas().items(), 1):
            again = partial(_check, lease, seed, failed, path)
            yield Part(f"ptxas {name}", 50 * number, again)
        yield Part("sanitizer", 235, partial(_check, lease, seed, failed, is_sanitized=True))
    else:
        # Imported here: it needs packages of the server's client.
        from bench.gpu.lease import product

        why = "no check of a kernel has failed" if entries else "no first command has left a record"
        lease.say(f"{why}: the whole product is tried")
        yield Part("prepare", 60, partial(product.prepare, lease))
        yield Part("product", 235, partial(product.show_product, lease))


def failed_kernels(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the checks of kernels that failed or hung.   entries: those of the first command."""
    return [
        entry["check"]
        for entry in entries
        if entry.get("check", "").startswith(_OF_KERNELS) and entry["ended"] in ("failed", "killed")
    ]


def find_ptxas() -> dict[str, str]:
    """Return the path of each ptxas but Triton's own: a carried one, and the machine's newest."""
    machines = sorted(os.path.realpath(path) for path in glob("/usr/local/cuda*/bin/ptxas"))
    carried = FOLDER / "ptxas"
    return {
        **({"carried": str(carried)} if carried.exists() else {}),
        **({"of the machine": machines[-1]} if machines else {}),
    }


def _measure(lease: Lease, part: str, **switches: str) -> None:
    assert command.measure([part], lease.is_dry, lease.rows, switches), "see above"


def _check(
    lease: Lease,
    seed: int,
    names: Sequence[str],
    ptxas: str | None = None,
    is_sanitized: bool = False,
) -> None:
    """Run the checks whose names begin so.   ptxas: path of another assembler than Triton's."""
    if ptxas:
        os.environ["TRITON_PTXAS_PATH"] = ptxas  # a part of the key of Triton's cache
    if is_sanitized:
        # In torch's pool an access behind a tensor's end is no error. Checks of kernels capture no
        # graphs, which would need the pool.
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    child.run_module(
        "tests.gpu", "--quick", f"--seed={seed}", f"--record={lease.entries_path}",
        *(["--dry"] if lease.is_dry else []), *(["--sanitize"] if is_sanitized else []),
        "--only", *names,
    )  # fmt: skip
