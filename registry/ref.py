"""References: of an adapter version, by which an engine knows it, and of its base model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One immutable version of an adapter.

    digest: sha256 of the canonical object, hex.   object_key: its key in the object store.
    rank: the largest rank of its modules.   size_bytes: bytes of the canonical object.
    """

    adapter_id: str
    version: int
    digest: str
    object_key: str
    rank: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class BaseRef:
    """The base model that a version was proved on.

    revision: sha256 of its config and weights.   variant: as registry.base.base_model documents it.
    """

    revision: str
    model_id: str
    variant: str
