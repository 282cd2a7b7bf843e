"""One command from its first row to its goals."""

import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from bench.gpu import attention, ceilings, copies, engine_rows, launches, lora_rows, small
from bench.gpu.ceilings import Ceilings
from bench.gpu.goals import verdicts
from bench.gpu.machine import DryRun, Gpu, Machine
from bench.gpu.rows import Row, RowFile, Runs
from bench.gpu.table import tables

_RESULTS = Path(__file__).parent.parent / "results"


def run(what: str, is_dry: bool, out: Path | None, deadline_s: float) -> int:
    """what: "kernels" or "engine".   deadline_s: on the monotonic clock.   The exit status."""
    if not is_dry and not torch.cuda.is_available():
        _say(["torch finds no CUDA device here; --dry runs on the CPU"])
        return 1
    machine = DryRun() if is_dry else Gpu()
    runs = Runs(RowFile(out or _path(machine, is_dry), machine.name), deadline_s)
    with torch.inference_mode():
        first = ceilings.row(machine)
        runs.run([first])
        measured = runs.file.find(first)
        if measured is not None:
            _say([f"{name}: {value}" for name, value in measured["result"].items()])
            found = Ceilings.of(measured["result"])
            rows = _kernel_rows if what == "kernels" else engine_rows.rows
            runs.run(rows(machine, found))
    _say([*tables(runs.file.rows()), ""])
    _say([f"not measured: {line}" for line in runs.missing])
    note = "; a dry run, its figures mean nothing" if is_dry else ""
    _say([f"Goals, over all rows of this commit on {machine.name}{note}:"])
    _say(verdicts(runs.file.rows()))
    return 1 if runs.num_failed else 0


def _kernel_rows(machine: Machine, found: Ceilings) -> Iterator[Row]:
    yield from launches.rows(machine)
    yield from small.rows(machine, found)
    yield from copies.rows(machine, found)
    yield from attention.decode_rows(machine, found)
    yield from attention.prefill_rows(machine, found)
    machine.free_memory()
    yield from lora_rows.rows(machine, found)


def _path(machine: Machine, is_dry: bool) -> Path:
    if is_dry:
        return Path(tempfile.mkdtemp(prefix="bench-gpu-")) / "rows.jsonl"
    device = re.sub(r"[^a-z0-9]+", "-", machine.name.lower())
    return _RESULTS / f"gpu-{device}.jsonl"


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()
