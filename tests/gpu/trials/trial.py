"""One kernel on random data: its outputs, and whether they are right."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch

from kernels.gpu import launch
from kernels.reference import FP8, FP8_MAX
from tests.kernels.far_rows import far_rows
from tests.kernels.lora_cases import assert_loses_no_more

Outputs = Sequence[torch.Tensor]
Work = TypeVar("Work")

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Trial:
    """One kernel on random data.

    run: (kernels, device) -> all outputs of one kernel, on the device; NaN where it writes nothing.
    judge: (our outputs, the reference's), in host memory; raises AssertionError if ours are wrong.
    """

    name: str
    run: Callable[[Any, torch.device], Outputs]
    judge: Callable[[Outputs, Outputs], None]


def same(ours: Outputs, torchs: Outputs) -> None:
    """Judge that outputs are the same to the bit."""
    for mine, theirs in zip(ours, torchs, strict=True):
        assert is_same(mine, theirs), describe_difference(mine, theirs)


def alike(ours: Outputs, _: Outputs) -> None:
    """Judge that a kernel gave the same bits twice, in different circumstances."""
    same(ours[:1], ours[1:])


def near(exact: Callable[[], Outputs]) -> Callable[[Outputs, Outputs], None]:
    """Make a judge: outputs lose at most twice what the reference loses in the same dtype; e4m3 is
    rounded to the nearest; integers are the same.

    exact: the outputs without any rounding to that dtype.
    """

    def judge(ours: Outputs, torchs: Outputs) -> None:
        for mine, theirs, true in zip(ours, torchs, exact(), strict=True):
            if not theirs.is_floating_point():
                assert torch.equal(mine, theirs), describe_difference(mine, theirs)
                continue
            written = ~theirs.float().isnan()
            is_there = ~mine.float().isnan()
            assert torch.equal(is_there, written), (
                f"it writes other places: {describe_difference(is_there, written)}"
            )
            if not written.any():
                continue
            if theirs.dtype == FP8:
                _check_rounding(carried(mine, theirs)[written], true[written])
                continue
            try:
                assert_loses_no_more(mine[written].float(), theirs[written].float(), true[written])
            except AssertionError as error:
                raise AssertionError(f"{error}: {describe_difference(mine, true)}") from None

    return judge


def _check_rounding(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """Assert that no e4m3 is further from the exact number than half a step, at most a 16th of it;
    the number itself may have been rounded to 16 bits before. The interpreter rounds some of the
    smallest numbers down.
    """
    true = exact.double().clamp(-FP8_MAX, FP8_MAX)
    half_a_step = (true.abs() / 16).clamp(min=2**-9)
    wrong = (ours.double() - true).abs() > 1.1 * half_a_step
    assert not wrong.any(), describe_difference(ours, true)


def carried(ours: torch.Tensor, torchs: torch.Tensor) -> torch.Tensor:
    """`ours`, with the carry that the interpreter forgets where it rounds up to a power of two."""
    if not launch.INTERPRETED:
        return ours
    mine, theirs = ours.float(), torchs.float()
    is_half = (theirs.frexp().mantissa.abs() == 0.5) & (mine == theirs / 2)
    return torch.where(is_half, theirs, mine)


def describe_difference(ours: torch.Tensor, expected: torch.Tensor) -> str:
    """Say how many numbers differ from the expected ones, in which rows, and where most."""
    mine, theirs = ours.float().double(), expected.float().double()
    differs = (mine != theirs) & ~(mine.isnan() & theirs.isnan())
    if not differs.any():
        return "the numbers are the same, their bits are not"
    off = (mine - theirs).abs().nan_to_num(nan=torch.inf).where(differs, -1.0)
    worst = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
    rows = differs.nonzero()[:, 0]
    return (
        f"{int(differs.sum())} of {differs.numel()} numbers differ, "
        f"in rows {int(rows.min())} to {int(rows.max())} of {len(differs)}, "
        f"most at {list(worst)}, which is {mine[worst]:.6g} for {theirs[worst]:.6g}"
    )


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors are the same bit for bit, including NaN."""
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (one, other)))


def on(there: torch.device, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copies of tensors on a device, which may be written to."""
    return [tensor.to(there, copy=True) for tensor in tensors]


GAP = 16
"""Elements between two rows of a tensor that lies apart."""
_GAP_BITS = {torch.float16: 0x7C01, torch.bfloat16: 0x7F81, torch.float32: 0x7F800001}
"""Signalling NaN: arithmetic makes it a quiet one, so that it shows even what adds 0 to a gap."""

_far: list[bool] = []


@contextmanager
def rows_far_apart() -> Iterator[None]:
    """Have `apart` put 2**31 elements between the first row and the last, in host memory."""
    _far.append(True)
    try:
        yield
    finally:
        _far.pop()


def apart(there: torch.device, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copies of tensors on a device, whose rows, tensor[i], are contiguous but not adjacent."""
    return [_apart(tensor, there) for tensor in tensors]


def _apart(tensor: torch.Tensor, there: torch.device) -> torch.Tensor:
    rows, columns = len(tensor), tensor[0].numel()
    if _far:
        wide = far_rows(rows, columns + GAP, tensor.dtype)
    else:
        wide = torch.empty(rows, columns + GAP, dtype=tensor.dtype, device=there)
    wide[:, :columns] = tensor.reshape(rows, columns).to(there)
    if tensor.dtype in _GAP_BITS:
        _bits(wide[:, columns:])[:] = _GAP_BITS[tensor.dtype]
    return wide[:, :columns].unflatten(1, tensor.shape[1:])


def check_gaps(tensor: torch.Tensor) -> None:
    """Assert that nothing was written behind the rows of a tensor that `apart` returned."""
    end = tensor.storage_offset() + tensor[0].numel()
    gaps = tensor.as_strided((len(tensor), GAP), (tensor.stride(0), 1), end)
    if tensor.dtype in _GAP_BITS:
        is_whole = _bits(gaps) == _GAP_BITS[tensor.dtype]
        assert is_whole.all(), "it writes behind its rows"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)


def work_on(there: torch.device, work: Work) -> Work:
    """A copy of a dataclass with its tensors on a device."""
    named = {field.name: getattr(work, field.name) for field in fields(work)}  # type: ignore
    moved = {k: v.to(there) for k, v in named.items() if isinstance(v, torch.Tensor)}
    return replace(work, **moved)  # type: ignore[type-var]


def randn(*shape: int, rng: torch.Generator, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=rng).to(dtype)


def randint(low: int, high: int, *shape: int, rng: torch.Generator) -> torch.Tensor:
    """Random int32 in [low, high)."""
    return torch.randint(low, high, shape, generator=rng).int()
