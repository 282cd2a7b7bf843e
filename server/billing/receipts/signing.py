"""The Ed25519 keys that receipts and statements are signed with.

Verification needs only the public key, so this module imports no database.
"""

import base64
import hashlib
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

# The signed bytes begin with this, so that a signature cannot be used for anything else.
_DOMAIN = b"chorale receipt 1\n"


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key. raw: 32 bytes.   key_id: the first 16 hex digits of their sha256."""

    raw: bytes

    @property
    def key_id(self) -> str:
        return hashlib.sha256(self.raw).hexdigest()[:16]

    def is_signed(self, sha256: str, signature: str) -> bool:
        """Whether this key made `signature` (base64) for the document hash `sha256` (hex)."""
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(
                base64.b64decode(signature, validate=True), _DOMAIN + sha256.encode()
            )
        except (InvalidSignature, ValueError):
            return False
        return True


class Signer:
    """Signs hashes of documents. seed: the private key's 32 bytes."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = PublicKey(self._key.public_key().public_bytes_raw())
        self.key_id = self.public.key_id

    def sign(self, sha256: str) -> str:
        """Return the signature in base64. Ed25519 is deterministic: a document has only one."""
        return base64.b64encode(self._key.sign(_DOMAIN + sha256.encode())).decode()
