"""The first command: facts, kernels, their time in a step, quick checks, and the chief rows."""

from functools import partial

from bench.gpu import attention, command, engine_rows, launches, open_loop
from bench.gpu.lease.compilers import make_setting
from bench.gpu.lease.facts import show_facts
from bench.gpu.lease.lease import Lease
from bench.gpu.lease.parts import Part
from bench.gpu.lease.record import say
from tests.gpu.checks import CHECKS
from tests.gpu.compiling import compile_all
from tests.gpu.harness import Checks, run_check

_CHECKS_FIRST = (
    "graphs.first", "whole_numbers.", "kernels.", "models.llama", "models.qwen3",
    "models.quantized",
)  # fmt: skip
_CHECKS_LAST = ("graphs.replays", "engine.cold_loads")
_AT_ONCE, _CHECK_S = 4, 60.0


def parts_of(lease: Lease) -> list[Part]:
    """The parts, the most informative first."""
    measure = partial(_measure, lease)
    engine = partial(engine_rows.rows, precision="16 bits", switches={}, cases=engine_rows.QUICK)
    return [
        Part("facts", 25, partial(show_facts, lease.is_dry)),
        Part("compile", 50, partial(_compile, lease)),
        Part("kernel times", 85, partial(measure, partial(engine_rows.kernel_rows, switches={}))),
        _checks(lease, "checks", 200, _CHECKS_FIRST),
        Part("launches", 208, partial(measure, lambda machine, _: launches.rows(machine))),
        Part("engine", 270, partial(measure, engine)),
        Part("attention", 290, partial(measure, attention.quick_decode_rows)),
        Part("adapters", 335, partial(measure, partial(open_loop.concurrent_rows, switches={}))),
        _checks(lease, "long checks", 410, _CHECKS_LAST),
    ]


def _compile(lease: Lease) -> None:
    if lease.is_dry:
        say("a dry run interprets its kernels")
    else:
        compile_all(lease.arch, say)


def _measure(lease: Lease, rows_of: command.Rows) -> None:
    """Measure rows. Raises AssertionError if one of them is wrong."""
    where = lease.rows, lease.device
    wrong_before = command.wrong_rows(*where)
    assert command.measure("rows", rows_of, lease.is_dry, *where)
    wrong = [row for row in command.wrong_rows(*where) if row not in wrong_before]
    assert not wrong, f"{len(wrong)} rows are wrong"


def _checks(lease: Lease, name: str, until_s: float, starts: tuple[str, ...]) -> Part:
    """Make a part of the checks that have, or begin with, one of these names, in that order.

    A name that ends in a dot is that of a group.
    """
    names = tuple(
        check
        for start in starts
        for check in CHECKS
        if check == start or (start.endswith(".") and check.startswith(start))
    )
    return Part(name, until_s, partial(_run_checks, lease, names), names)


def _run_checks(lease: Lease, names: tuple[str, ...]) -> None:
    note = partial(lease.record.note_check, seed=lease.seed)
    checks = Checks(_AT_ONCE, lease.limit_s(_CHECK_S), say, note)
    make = make_setting(lease.seed, lease.is_dry)
    checks.run({name: partial(run_check, CHECKS[name], make) for name in names})
    assert not checks.failed, f"failed: {', '.join(checks.failed)}"
