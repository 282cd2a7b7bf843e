"""Where an engine listens, as the gateways and the engine itself name it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Endpoint:
    """address: "ipc://PATH" on one machine, "tcp://HOST:PORT" across machines.

    server_key: the engine's public CURVE key, of tcp only.
    """

    address: str
    server_key: str = ""

    @classmethod
    def of_socket(cls, path: Path) -> "Endpoint":
        return cls(f"ipc://{path}")
