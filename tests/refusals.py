"""Faults that tests wait for."""

import pytest

from registry.errors import Fault


def refused(code, match=None):
    """Check that the block raises a fault of this code, and words that match."""
    return pytest.raises(Fault, match=match, check=lambda fault: fault.code == code)
