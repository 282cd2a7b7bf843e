"""Reference by which an engine knows an adapter version: digest, key and size, but no name."""

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
