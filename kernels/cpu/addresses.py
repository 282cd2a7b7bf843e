"""Addresses of tensors for compiled code: the only place that takes them.

Compiled code does not keep the tensor whose memory it reads. So whoever passes an address keeps its
tensor: the arguments of a call are kept until it returns, and a struct keeps what it points to.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def addresses(values: Sequence[Any]) -> list[Any]:
    """The values, with the address of its first element for each tensor. Keep the values."""
    return [v.data_ptr() if type(v) is Tensor else v for v in values]


def address_table(tensors: Sequence[Tensor]) -> Tensor:
    """Addresses as a table that compiled code reads, [n] int64. Keep the tensors."""
    return torch.tensor(addresses(tensors), dtype=torch.int64)


def taking_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, to be called with tensors, which are kept until it returns."""

    def call(*arguments: Any) -> Any:
        return function(*addresses(arguments))

    return call


class Struct(ctypes.Structure):
    """A struct of C that is made of tensors and numbers, and keeps its tensors."""

    def __init__(self, *values: Any) -> None:
        self._kept = values
        super().__init__(*addresses(values))
