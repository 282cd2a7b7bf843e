"""The command's work: measures the benchmark's parts, one after the other, and judges the goals."""

import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import child
from bench.gpu import (
    attention,
    ceilings,
    copies,
    engine_rows,
    launches,
    lora_rows,
    open_loop,
    small,
)
from bench.gpu.ceilings import Ceilings
from bench.gpu.goals import verdicts
from bench.gpu.machine import DryRun, Gpu, Machine, dry_name
from bench.gpu.probe import NoGpu, probe
from bench.gpu.rows import Row, RowFile, Runs, set_deadly_alarm
from bench.gpu.table import tables

_RESULTS = Path(__file__).parent.parent / "results"
_PART_S = 36000.0
"""Limit of a part, more than its rows take together: each row has a limit of its own."""

_ROW_S, _DRY_ROW_S = 120, 900
"""Limits of a row; a row that takes longer hangs. A dry run may have to wait for a busy machine."""

Rows = Callable[[Machine, Ceilings], Iterator[Row]]


def _attention(machine: Machine, found: Ceilings) -> Iterator[Row]:
    yield from attention.decode_rows(machine, found)
    yield from attention.prefill_rows(machine, found)


def _small(machine: Machine, found: Ceilings) -> Iterator[Row]:
    yield from small.rows(machine, found)
    yield from copies.rows(machine, found)


def parts_of(switches: Mapping[str, Any]) -> dict[str, Rows]:
    """All parts by name, most important first; the ceilings are measured before each.

    switches: settings of the engines, named as in EngineConfig.
    """
    engine = partial(engine_rows.rows, switches=switches)
    return {
        "launches": lambda machine, _: launches.rows(machine),
        "kernels": partial(engine_rows.kernel_rows, switches=switches),
        "lora": lora_rows.rows,
        "attention": _attention,
        "engine": partial(engine, precision="16 bits", cases=engine_rows.ALL),
        "concurrent": partial(open_loop.concurrent_rows, switches=switches),
        "open-loop": partial(open_loop.rows, switches=switches),
        "small": _small,
        "fp8": partial(engine, precision="fp8", cases=engine_rows.FP8),
    }


def run(parts: Sequence[str], is_dry: bool, out: Path | None, switches: Mapping[str, Any]) -> int:
    """Measure these parts, print tables and verdicts, and return the exit status.

    switches: see parts_of.
    """
    try:
        name = dry_name() if is_dry else _prepare()
    except NoGpu as error:
        _say([str(error)])
        return 1
    path = out or path_of(name, Path(tempfile.mkdtemp(prefix="bench-gpu-")) if is_dry else _RESULTS)
    for part in parts:
        measure(part, parts_of(switches)[part], is_dry, path, name)
    _say(report(path, name, is_dry))
    return 1 if wrong_rows(path, name) else 0


def wrong_rows(path: Path, name: str) -> list[dict[str, Any]]:
    """Return the rows in a file, of these sources on this device, that have a wrong result."""
    return [row for row in RowFile(path, name).rows() if not row["result"]["correct"]]


def report(path: Path, name: str, is_dry: bool) -> list[str]:
    """Return tables of all rows in a file, of these sources on this device, and the goals."""
    rows, num_wrong = RowFile(path, name).rows(), len(wrong_rows(path, name))
    note = "; a dry run, its figures mean nothing" if is_dry else ""
    return [
        *tables(rows),
        "",
        f"{len(rows)} rows, {num_wrong} of them wrong: {path}",
        f"Goals, over all rows of these sources on {name}{note}:",
        *verdicts(rows),
    ]


def _prepare() -> str:
    """Compile all kernels for this machine's GPU and return the GPU's name. Raises NoGpu."""
    # Imported here: a dry run interprets its kernels and compiles nothing.
    from tests.gpu.compiling import compile_all

    found = probe()
    _say([str(found)])
    compile_all(found.arch, lambda line: _say([line]))
    return found.name


def measure(part: str, rows_of: Rows, is_dry: bool, path: Path, name: str) -> bool:
    """Measure a part in a child. If the child dies, the row it was measuring is marked wrong, and
    another child goes on with the next row. Returns whether the part came to its end.
    """
    RowFile(path, name).end()  # a command that was killed has left its row marked as under way
    num_rows = -1
    while True:
        work = partial(_measure_rows, rows_of, is_dry, path, name)
        ended = child.run(work, _PART_S, sys.stdout)
        if ended.failure is None:
            return True
        file = RowFile(path, name)
        file.give_up(ended.failure)
        if len(file.rows()) == num_rows:
            _say([f"{part}: {ended.failure}, and before it measured anything"])
            return False
        num_rows = len(file.rows())


def _measure_rows(rows_of: Rows, is_dry: bool, path: Path, name: str) -> None:
    machine = DryRun() if is_dry else Gpu()
    limit_s = machine.pick(_ROW_S, _DRY_ROW_S)
    runs = Runs(RowFile(path, name), machine.is_sound, limit_s, set_deadly_alarm)
    with torch.inference_mode():
        first = ceilings.row(machine)
        runs.run([first])
        measured = runs.file.find(first)
        found = Ceilings.of(measured["result"] if measured else {})
        runs.run(rows_of(machine, found))
    _say([f"not measured: {line}" for line in runs.missing])


def path_of(name: str, folder: Path) -> Path:
    """Return the path of a device's rows in a folder."""
    return folder / f"gpu-{re.sub(r'[^a-z0-9]+', '-', name.lower())}.jsonl"


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()
