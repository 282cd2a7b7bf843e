"""The command's work: measures the benchmark's parts, one after the other, and judges the goals."""

import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import child
from bench.gpu import attention, ceilings, engine_rows
from bench.gpu.ceilings import Ceilings
from bench.gpu.machine import DryRun, Gpu, Machine, dry_name
from bench.gpu.page import goal_lines
from bench.gpu.probe import NoGpu, probe
from bench.gpu.rows import Row, RowFile, Runs, set_deadly_alarm

_RESULTS = Path(__file__).parent.parent / "results"
_PART_S = 36000.0
"""Limit of a part, more than its rows take together: each row has a limit of its own."""

_ROW_S, _DRY_ROW_S = 120, 900
"""Limits of a row; a row that takes longer hangs. A dry run may have to wait for a busy machine."""

Switches = Mapping[str, Any]
"""Settings of engines, named as in EngineConfig; they are part of the rows' setup."""

PARTS: dict[str, Callable[[Machine, Ceilings, Switches], Iterator[Row]]] = {
    "ceilings": lambda *_: iter(()),  # every part measures them first
    "engine": engine_rows.rows,
    "attention": lambda machine, found, _: attention.rows(machine, found),
    "kernels": engine_rows.kernel_rows,
}
"""All parts, the most important first; each yields its most important rows first."""


def main(parts: Sequence[str], is_dry: bool, out: Path | None, switches: Switches) -> int:
    """Measure these parts and return the exit status."""
    try:
        device = dry_name() if is_dry else probe().name
    except NoGpu as error:
        sys.exit(str(error))
    folder = Path(tempfile.mkdtemp(prefix="bench-gpu-")) if is_dry else _RESULTS
    file = RowFile(out or path_of(device, folder), device)
    return int(not measure(parts, is_dry, file, switches))


def measure(parts: Sequence[str], is_dry: bool, file: RowFile, switches: Switches) -> bool:
    """Measure these parts and print their verdicts. Returns whether all that it measured is right
    and each part came to its end.
    """
    file.read()  # other parts may have run since
    before = file.rows()
    ended = [_measure_part(part, is_dry, file, switches) for part in parts]
    rows = file.rows()
    wrong = [row for row in rows[len(before) :] if not row["result"]["correct"]]
    note = "; a dry run, its figures mean nothing" if is_dry else ""
    _say(f"{len(rows) - len(before)} new rows, {len(wrong)} of them wrong: {file.path}{note}")
    for line in goal_lines(file.device, rows):
        _say(line)
    return all(ended) and not wrong


def _measure_part(part: str, is_dry: bool, file: RowFile, switches: Switches) -> bool:
    """Measure a part in a child. If the child dies, the row it was measuring is marked wrong, and
    another child goes on with the next row. Returns whether the part came to its end.
    """
    file.end()  # a command that was killed has left its row marked as under way
    while True:
        num_rows = len(file.rows())
        ended = child.run(partial(_measure, part, is_dry, file, switches), _PART_S, sys.stdout)
        file.read()
        if ended.failure is None:
            return True
        file.give_up(ended.failure)
        if len(file.rows()) == num_rows:
            _say(f"{part}: {ended.failure}, and before it measured anything")
            return False


def _measure(part: str, is_dry: bool, file: RowFile, switches: Switches) -> None:
    machine = DryRun() if is_dry else Gpu()
    limit_s = machine.pick(_ROW_S, _DRY_ROW_S)
    runs = Runs(file, machine.is_sound, limit_s, set_deadly_alarm)
    with torch.inference_mode():
        first = ceilings.row(machine)
        runs.run([first])
        measured = file.find(first)
        found = Ceilings.of(measured["result"] if measured else {})
        runs.run(PARTS[part](machine, found, switches))


def path_of(device: str, folder: Path) -> Path:
    """Return the path of a device's rows in a folder."""
    return folder / f"gpu-{re.sub(r'[^a-z0-9]+', '-', device.lower())}.jsonl"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
