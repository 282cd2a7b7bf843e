"""The base model that a version was proved on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BaseRef:
    """The base model that a version was proved on.

    revision: sha256 of its config and weights.   variant: as registry.base.base_model documents it.
    """

    revision: str
    model_id: str
    variant: str
