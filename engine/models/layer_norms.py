"""The norms around a layer's attention and MLP; a family has some of the four."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class LayerNorms(Generic[T]):
    """Names of a layer's norms, or their weights, [hidden] each; None for norms that do not exist.

    before_attention, before_mlp: norms of what attention and MLP read from the residual stream.
    after_attention, after_mlp: norms of what they add to it.
    """

    before_attention: T | None = None
    after_attention: T | None = None
    before_mlp: T | None = None
    after_mlp: T | None = None

    def __iter__(self) -> Iterator[T]:
        """Iterate over those that exist, in the order in which a token passes them."""
        return (norm for norm in self._all() if norm is not None)

    def map(self, change: Callable[[T], U]) -> "LayerNorms[U]":
        """The same norms with each that exists changed."""
        return LayerNorms(*(None if norm is None else change(norm) for norm in self._all()))

    def _all(self) -> tuple[T | None, ...]:
        return self.before_attention, self.after_attention, self.before_mlp, self.after_mlp
