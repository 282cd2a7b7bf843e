"""The seam between the engine and a grammar library."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.uint8]
"""Tokens that may be chosen, a bit each, the lowest bit first: [mask_bytes(vocab size)]."""


def mask_bytes(vocab_size: int) -> int:
    """Length of a mask: whole words of 64 bits."""
    return -(-vocab_size // 64) * 8


class ConstraintFailed(Exception):
    """A grammar is not served, or an answer's next token took more work than one may."""


class Matcher(Protocol):
    """How far one answer has come in its grammar."""

    def fork(self) -> "Matcher":
        """Make a matcher that has come as far as this one."""
        ...

    def consume(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens that the masks allowed. Raises ConstraintFailed."""
        ...

    def mask(self) -> Mask:
        """Find the tokens that may come next; EOS is one where the answer may end, and the only one
        where nothing else may come. Raises ConstraintFailed.
        """
        ...


class Grammars(Protocol):
    def compile(self, text: str) -> Matcher:
        """Compile a grammar in llguidance's JSON form. Raises ConstraintFailed."""
        ...
