"""What is timed is checked first; what is wrong is timed all the same, and its row says so."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

_FACTOR = 4
"""How much more than plain torch in the same dtype may be lost: sums in another order."""

_FEW_BITS = 1e-5

_collecting: list[list[str]] = []


class Wrong(AssertionError):
    """A result that is not the one to be timed."""


@contextmanager
def collected() -> Iterator[list[str]]:
    """Inside of it, whatever a check finds wrong is put into the list and raises nothing."""
    _collecting.append([])
    try:
        yield _collecting[-1]
    finally:
        _collecting.pop()


def note_wrong(text: str) -> None:
    """Something is wrong. Raises Wrong where nobody collects."""
    if not _collecting:
        raise Wrong(text)
    _collecting[-1].append(text)


def describe(error: Exception) -> str:
    """An error as one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def attempt(work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The figures that `work` measures; where it fails or finds something wrong, `failed` says why.

    So another one's kernels, or one way of ours, do not take the other figures of a row with them.
    """
    with collected() as wrong:
        try:
            figures = work()
        except Exception as error:
            return {"failed": describe(error)}
    return {**figures, "failed": wrong[0]} if wrong else {**figures}


def check_close(what: str, ours: torch.Tensor, torchs: torch.Tensor, exact: torch.Tensor) -> None:
    """Ours loses no more than torch does. torchs: in the same dtype.   exact: float32 or more."""
    allowed = _FACTOR * _largest(torchs.to(exact.dtype) - exact) + _FEW_BITS * _largest(exact)
    lost = _largest(ours.to(exact.dtype) - exact)
    if not lost <= allowed:  # NaN is not, either
        note_wrong(f"{what}: off by {lost:.3g}, torch by less than {allowed:.3g}")


def check_equal(what: str, ours: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(ours, expected):
        note_wrong(f"{what}: {int((ours != expected).sum())} of {expected.numel()} differ")


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().max())
