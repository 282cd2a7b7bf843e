"""The keys of a pool of engines, derived from one secret so that an installation's gateways agree.

Engines get the two keys that they need in their config, and never the pepper, which is the secret.
"""

from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

_KEY_BYTES = 32
_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A pair of keys for `engine.wire.tcp`, as Z85 texts of 40 characters."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def of(cls, seed: bytes) -> "CurveKeys":
        """Derive a pair from `seed`, 32 bytes; the public key is X25519's."""
        public = X25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
        return cls(z85.encode(public).decode(), z85.encode(seed).decode())


@dataclass(frozen=True, slots=True)
class InstallationKeys:
    """Keys of all engines and of all gateways, by which they prove themselves to each other.

    engine: the engines' pair.   gateway: the gateways' pair.
    pool_id: 16 hex digits, the name of this installation's pool on a cluster; no secret.
    """

    engine: CurveKeys
    gateway: CurveKeys
    pool_id: str

    @classmethod
    def of(cls, pepper: str) -> "InstallationKeys":
        """Derive the keys from `pepper`, the installation's secret in hex."""
        secret = bytes.fromhex(pepper)
        return cls(
            CurveKeys.of(_derive(secret, "engine of a pool", _KEY_BYTES)),
            CurveKeys.of(_derive(secret, "gateway of a pool", _KEY_BYTES)),
            _derive(secret, "name of a pool", _ID_BYTES).hex(),
        )


def _derive(secret: bytes, label: str, length: int) -> bytes:
    return HKDF(SHA256(), length, salt=None, info=f"chorale 1 {label}".encode()).derive(secret)
