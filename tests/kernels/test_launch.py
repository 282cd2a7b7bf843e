"""How many programs of a compiled kernel a multiprocessor holds, and how many are launched."""

from types import SimpleNamespace
from unittest import mock

import pytest
from triton.runtime import driver

from kernels.gpu import launch

MULTIPROCESSORS = 10


@pytest.mark.parametrize(
    ("held", "arch", "num_warps", "taken"),
    [
        (4, 90, 4, (128, 5120)),  # registers
        (3, 90, 4, (129, 5120)),  # a warp gets a multiple of 256
        (12, 90, 1, (152, 0)),  # 13 would fit, were the registers not in four partitions
        (1, 90, 8, (255, 0)),
        (9, 90, 4, (32, 24576)),  # shared memory, with 1 KiB for each program
        (6, 80, 4, (32, 24576)),
        (4, 86, 4, (32, 24576)),
        (8, 80, 8, (24, 0)),  # warps
        (6, 89, 8, (24, 0)),
        (32, 90, 1, (24, 0)),  # programs
        (24, 120, 1, (24, 0)),
        (16, 86, 1, (24, 0)),
        (32, 103, 1, (24, 0)),  # the limits of 100
        (24, 121, 1, (24, 0)),  # those of 120
        (2, 100, 4, (32, 0, 256)),  # tensor memory
        (1, 90, 4, (32, 300 << 10)),  # whether it can be launched is for the driver to say
    ],
)
def test_a_multiprocessor_holds_what_its_scarcest_resource_allows(held, arch, num_warps, taken):
    assert launch.resident_programs(arch, num_warps, *taken) == held


class Compiled:
    """A compiled kernel whose registers are known once it is loaded."""

    def __init__(self, registers):
        self._registers, self.num_loads, self.launched = registers, 0, []
        self.metadata = SimpleNamespace(
            target=SimpleNamespace(arch=90), num_warps=4, shared=0, tmem_size=None
        )

    def _init_handles(self):
        self.num_loads += 1
        self.n_regs = self._registers

    def __getitem__(self, grid):
        return lambda *args: self.launched.append((grid, args))


class Kernel:
    """A kernel with a specialisation for each `x`."""

    arg_names = ("x", "y", "SIZE", "FLAG")

    def __init__(self, **variants):
        self.variants = variants

    def run(self, x, y, *, grid, warmup, **constants):
        assert warmup, "launched with a grid that does not come from the compiled kernel"
        assert set(constants) == {"FLAG", "SIZE", "num_warps"}
        return self.variants[x]


@pytest.fixture
def on_a_gpu():
    properties = {"multiprocessor_count": MULTIPROCESSORS}
    gpu = SimpleNamespace(
        get_current_device=lambda: 0,
        utils=SimpleNamespace(get_device_properties=lambda _: properties),
    )
    with mock.patch.object(launch, "INTERPRETED", False), mock.patch.object(driver, "_active", gpu):
        yield


@pytest.mark.usefixtures("on_a_gpu")
def test_a_specialisation_is_launched_with_the_programs_that_it_fits_in():
    small, large = Compiled(registers=56), Compiled(registers=128)
    kernel = Kernel(a=small, b=large)
    for x in ("a", "b", "a"):
        launch.persistent(kernel, x, 7, FLAG=True, SIZE=3, num_warps=4)
    # Constants follow in the kernel's own order, without the options of the compiler.
    assert small.launched == 2 * [((9 * MULTIPROCESSORS, 1, 1), ("a", 7, 3, True))]
    assert large.launched == [((4 * MULTIPROCESSORS, 1, 1), ("b", 7, 3, True))]
    assert (small.num_loads, large.num_loads) == (1, 1)
