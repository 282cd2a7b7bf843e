"""Cost of a node of a captured graph: a kernel, a clearing one, a branch to a second stream."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.gpu.check import check_equal
from bench.gpu.machine import Machine
from bench.gpu.rows import Row
from bench.report import rounded

_BRANCH_EVERY = 4


def rows(machine: Machine) -> Iterator[Row]:
    nodes = machine.pick(400, 8)
    yield Row("gpu.launches", {"nodes": nodes}, partial(_measure, machine, nodes))


def _measure(machine: Machine, nodes: int) -> dict[str, float]:
    here, beside, cleared = (torch.zeros(1, device=machine.there) for _ in range(3))

    def branch(number: int) -> None:
        if number % _BRANCH_EVERY == 0:
            join = machine.device.beside(lambda: beside.add_(1))
            here.add_(1)
            join()
        else:
            here.add_(1)

    def clear(number: int) -> None:
        here.add_(1)
        cleared.zero_()

    plain = partial(_chain, lambda number: here.add_(1), nodes)
    machine.run(plain)
    check_equal("a chain of additions", here, torch.full_like(here, nodes))
    seconds = {
        name: machine.seconds(work)
        for name, work in (
            ("plain", plain),
            ("branches", partial(_chain, branch, nodes)),
            ("clears", partial(_chain, clear, nodes)),
        )
    }
    num_branches = nodes // _BRANCH_EVERY
    return {
        "node_us": rounded(1e6 * seconds["plain"] / nodes),
        "branch_us": rounded(1e6 * (seconds["branches"] - seconds["plain"]) / num_branches),
        "clear_us": rounded(1e6 * (seconds["clears"] - seconds["plain"]) / nodes),
    }


def _chain(node: Callable[[int], object], nodes: int) -> None:
    for number in range(nodes):
        node(number)
