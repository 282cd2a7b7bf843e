"""Cases that only the slow sweeps of `make soak` run."""

from typing import Any

import pytest


def soak(*cases: Any) -> list[Any]:
    """Mark cases of a parametrised test; a tuple is a case's several arguments."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak)
        for case in cases
    ]
