"""The base model that a version was proved on, and the one that serves it now."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar


@dataclass(frozen=True, slots=True)
class BaseRef:
    """The base model that a version was proved on.

    revision: sha256 of its config and weights.   variant: as registry.base_model documents it.
    model_id, variant: None for a version from before they were noted; any base model of the
    revision serves it.
    """

    revision: str
    model_id: str | None = None
    variant: str | None = None


class Model(Protocol):
    """A base model that is served; registry.base_model documents the properties."""

    @property
    def model_id(self) -> str: ...
    @property
    def base_revision(self) -> str: ...
    @property
    def variant(self) -> str: ...


M = TypeVar("M", bound=Model)


def serving(models: Iterable[M], ref: BaseRef) -> M | None:
    """The base model that serves the versions of `ref`: the one of its name, while it has the same
    weights; else, since an operator may have renamed it, the first of the same variant.
    """
    of_revision = [model for model in models if model.base_revision == ref.revision]
    for model in of_revision:
        if model.model_id == ref.model_id:
            return model
    return next((it for it in of_revision if ref.variant in (None, it.variant)), None)
