"""What is timed must be right first."""

import torch

_FACTOR = 4
"""How much more than plain torch in the same dtype may be lost: sums in another order."""

_FEW_BITS = 1e-5


class Wrong(AssertionError):
    """A result that is not the one to be timed."""


def check_close(what: str, ours: torch.Tensor, torchs: torch.Tensor, exact: torch.Tensor) -> None:
    """Ours loses no more than torch does. torchs: in the same dtype.   exact: float32 or more."""
    allowed = _FACTOR * _largest(torchs.to(exact.dtype) - exact) + _FEW_BITS * _largest(exact)
    lost = _largest(ours.to(exact.dtype) - exact)
    if not lost <= allowed:  # NaN is not, either
        raise Wrong(f"{what}: off by {lost:.3g}, torch by less than {allowed:.3g}")


def check_equal(what: str, ours: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(ours, expected):
        raise Wrong(f"{what}: {int((ours != expected).sum())} of {expected.numel()} differ")


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().max())
