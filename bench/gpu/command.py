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
_PART_S = 3600.0
"""Limit of a part. It exceeds the time of its rows: each row has a limit, and no row begins after
the deadline.
"""

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
    return {
        "launches": lambda machine, _: launches.rows(machine),
        "lora": lora_rows.rows,
        "attention": _attention,
        "engine": partial(engine_rows.rows, precision="16 bits", switches=switches),
        "open-loop": partial(open_loop.rows, switches=switches),
        "small": _small,
        "fp8": partial(engine_rows.rows, precision="fp8", switches=switches),
    }


def run(
    parts: Sequence[str],
    is_dry: bool,
    out: Path | None,
    deadline_s: float,
    switches: Mapping[str, Any],
) -> int:
    """Measure these parts, print tables and verdicts, and return the exit status.

    deadline_s: time on the monotonic clock.   switches: see parts_of.
    """
    try:
        name = dry_name() if is_dry else _prepare()
    except NoGpu as error:
        _say([str(error)])
        return 1
    path = out or _path(name, is_dry)
    RowFile(path, name).end()  # a command that was killed has left its row marked as under way
    for part in parts:
        rows_of = parts_of(switches)[part]
        _measure_part(
            part, partial(_measure_rows, rows_of, is_dry, path, name, deadline_s), path, name
        )
    rows = RowFile(path, name).rows()
    wrong = [row for row in rows if not row["result"]["correct"]]
    note = "; a dry run, its figures mean nothing" if is_dry else ""
    _say([*tables(rows), "", f"{len(rows)} rows, {len(wrong)} of them wrong: {path}"])
    _say([f"Goals, over all rows of these sources on {name}{note}:", *verdicts(rows)])
    return 1 if wrong else 0


def _prepare() -> str:
    """Compile all kernels for this machine's GPU and return the GPU's name. Raises NoGpu."""
    # Imported here: a dry run interprets its kernels and compiles nothing.
    from tests.gpu.compiling import compile_all

    found = probe()
    _say([str(found)])
    compile_all(found.arch, lambda line: _say([line]))
    return found.name


def _measure_part(part: str, work: Callable[[], None], path: Path, name: str) -> None:
    """Measure a part in a child. If the child dies, the row it was measuring is marked wrong, and
    another child goes on with the next row.
    """
    num_rows = -1
    while True:
        ended = child.run(work, _PART_S, is_heard=True)
        if ended.failure is None:
            return
        file = RowFile(path, name)
        file.give_up(ended.failure)
        if len(file.rows()) == num_rows:
            _say([f"{part}: {ended.failure}, and before it measured anything"])
            return
        num_rows = len(file.rows())


def _measure_rows(rows_of: Rows, is_dry: bool, path: Path, name: str, deadline_s: float) -> None:
    machine = DryRun() if is_dry else Gpu()
    runs = Runs(
        RowFile(path, name),
        deadline_s,
        machine.is_sound,
        machine.pick(_ROW_S, _DRY_ROW_S),
        set_deadly_alarm,
    )
    with torch.inference_mode():
        first = ceilings.row(machine)
        runs.run([first])
        measured = runs.file.find(first)
        found = Ceilings.of(measured["result"] if measured else {})
        runs.run(rows_of(machine, found))
    _say([f"not measured: {line}" for line in runs.missing])


def _path(name: str, is_dry: bool) -> Path:
    if is_dry:
        return Path(tempfile.mkdtemp(prefix="bench-gpu-")) / "rows.jsonl"
    device = re.sub(r"[^a-z0-9]+", "-", name.lower())
    return _RESULTS / f"gpu-{device}.jsonl"


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()
