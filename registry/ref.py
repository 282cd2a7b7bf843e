"""A version of an adapter as the engine knows it: digest, place and size, never a name."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One immutable version of an adapter.

    digest: sha256 of the canonical object, hex.   object_key: where the object store keeps it.
    rank: the largest rank of its modules.   size_bytes: of the canonical object.
    """

    adapter_id: str
    version: int
    digest: str
    object_key: str
    rank: int
    size_bytes: int
