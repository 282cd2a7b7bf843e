"""The address at which an engine listens, as the gateways and the engine itself name it."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of an engine, with the keys that protect it.

    address: "ipc://PATH" on one machine, "tcp://HOST:PORT" across machines.
    server_key: the engine's public CURVE key.   client_key: the gateway's secret one. TCP requires
    both keys; nothing else uses them.
    """

    address: str
    server_key: str = ""
    client_key: str = field(default="", repr=False)

    @classmethod
    def of_socket(cls, path: Path) -> "Endpoint":
        return cls(f"ipc://{path}")

    @property
    def is_remote(self) -> bool:
        return self.address.startswith("tcp://")
