"""The functions of `kernels.gpu.ops` have the names and the arguments of `kernels.reference`."""

import inspect

import pytest

from kernels import reference
from kernels.gpu import ops

MEANT = [
    name
    for name, value in vars(reference).items()
    if inspect.isfunction(value)
    and value.__module__ == reference.__name__
    and not name.startswith("_")
]


def test_every_kernel_that_has_a_meaning_is_there_and_no_other():
    assert sorted(ops.__all__) == sorted(MEANT)


@pytest.mark.parametrize("name", MEANT)
def test_a_kernel_is_called_as_its_meaning_is(name):
    ours, meant = (inspect.signature(getattr(module, name)) for module in (ops, reference))
    assert ours == meant
