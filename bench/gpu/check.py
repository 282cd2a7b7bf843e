"""Checks of results before they are timed; wrong ones are timed, too, and their row says so."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

_FACTOR = 4
"""Allowed error as a multiple of plain torch's in the same dtype: sums are in another order."""

_FEW_BITS = 1e-5

_collecting: list[list[str]] = []


class Wrong(AssertionError):
    """The work to be timed gives a wrong result."""


@contextmanager
def collected() -> Iterator[list[str]]:
    """Collect the errors that checks find within this context in a list, and do not raise them."""
    _collecting.append([])
    try:
        yield _collecting[-1]
    finally:
        _collecting.pop()


def note_wrong(text: str) -> None:
    """Note that something is wrong. Raises Wrong outside of `collected`."""
    if not _collecting:
        raise Wrong(text)
    _collecting[-1].append(text)


def describe(error: Exception) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def attempt(work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures that `work` measures; if it fails or a check does, `failed` says why.

    So other figures of a row survive when a peer's kernels, or one variant of ours, fail.
    """
    with collected() as wrong:
        try:
            figures = work()
        except Exception as error:
            return {"failed": describe(error)}
    return {**figures, "failed": wrong[0]} if wrong else {**figures}


def check_close(what: str, ours: torch.Tensor, torchs: torch.Tensor, exact: torch.Tensor) -> None:
    """Check that ours is about as close to `exact` as torch is. torchs: torch's result in the same
    dtype.   exact: the result in float32 or wider.
    """
    allowed = _FACTOR * _largest(torchs.to(exact.dtype) - exact) + _FEW_BITS * _largest(exact)
    lost = _largest(ours.to(exact.dtype) - exact)
    if not lost <= allowed:  # also true for NaN
        note_wrong(f"{what}: off by {lost:.3g}, torch by less than {allowed:.3g}")


def check_equal(what: str, ours: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(ours, expected):
        note_wrong(f"{what}: {int((ours != expected).sum())} of {expected.numel()} differ")


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().max())
