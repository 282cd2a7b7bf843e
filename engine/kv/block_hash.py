"""Hashes by which KV blocks are found: of everything that their keys and values depend on."""

import hashlib
import json
from array import array
from collections.abc import Sequence


class BlockHasher:
    """Chained block hashes: 16 bytes over the previous hash, the scope, and the block's tokens.

    The scope is what besides tokens decides whether KV may be shared: revision of the base model,
    adapter digest and tenant salt, as tagged fields, so that no value of one field can pass for
    another's. Blocks before the adapter's start have the base model's scope, so that the tenant's
    requests to the base model find them, too. Prefixes that the operator declared public on the
    base model have a scope of their own, the same for every tenant.
    public_prefixes: their token ids.
    """

    def __init__(
        self,
        block_size: int,
        public_prefixes: Sequence[Sequence[int]] = (),
        base_revision: str = "",
    ) -> None:
        self.block_size = block_size
        self.base_revision = base_revision
        self._public_prefixes = tuple(tuple(prefix) for prefix in public_prefixes)
        self._public = _scope(base=base_revision, public=True)

    def scope(self, salt: str, digest: str | None) -> bytes:
        """Scope of a tenant's private blocks.   digest: of the adapter that they depend on."""
        return _scope(base=self.base_revision, adapter=digest, salt=salt)

    def num_public_blocks(self, prompt: Sequence[int]) -> int:
        """Number of whole blocks at the start of the prompt that also start a public prefix."""
        lengths = (_num_common(prefix, prompt) for prefix in self._public_prefixes)
        return max(lengths, default=0) // self.block_size

    def hash(self, parent: bytes, scope: bytes, is_public: bool, tokens: Sequence[int]) -> bytes:
        """Hash of one full block; `parent` is that of the block before it, b"" for the first."""
        root = self._public if is_public else scope
        data = b"".join((parent, root, array("I", tokens).tobytes()))
        return hashlib.blake2b(data, digest_size=16).digest()


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens at the start that are the same in both."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _scope(**fields: object) -> bytes:
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).digest()
