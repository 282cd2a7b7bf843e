"""Faults that tests wait for."""

import pytest

from registry.errors import Fault


def refused(code, match=None, param=None):
    """Check that the block raises a fault of this code, with words that match and this param."""

    def check(fault):
        return fault.code == code and param in (None, fault.param)

    return pytest.raises(Fault, match=match, check=check)
