"""Times an adapter's way from a folder to a served version, by the command line's own client."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.product import Product
from server.client.http import Answer, Client
from server.client.progress import Stage, Watcher
from server.client.uploads import Uploader


@dataclass(frozen=True)
class Pushed:
    """A finished upload; its moments are values of time.perf_counter().   version: the version as
    the API shows it.
    """

    opened: float
    sent: float
    answered: float
    version: Mapping[str, Any]

    @property
    def transfer_s(self) -> float:
        """Seconds from the request that opens the upload to the last part's acknowledgement."""
        return self.sent - self.opened

    @property
    def completion_s(self) -> float:
        """Seconds of completing the upload: assemble, check, store, prove, publish."""
        return self.answered - self.sent

    @property
    def proof_s(self) -> float:
        """Seconds of the engine's proof, a part of the completion, loading included."""
        return float(self.version["passport"]["canary"]["seconds"])


def push(product: Product, key: str, name: str, folder: Path, *, direct: bool = False) -> Pushed:
    """Upload an adapter. direct: to the object store by URLs; else through the gateway. Digests are
    computed before the time starts.
    """
    noted, client = _Noted(), _Client(product.url, key)
    with client:
        upload = Uploader(client).push(name, folder, direct=direct, watcher=noted).upload
    return Pushed(client.first_asked, noted.checking, time.perf_counter(), upload["version"])


class _Client(Client):
    """A client that notes the time of its first request."""

    first_asked = 0.0

    def ask(self, *request: Any, **options: Any) -> Answer:
        self.first_asked = self.first_asked or time.perf_counter()
        return super().ask(*request, **options)


class _Noted(Watcher):
    """A watcher that notes when all parts had been sent."""

    checking = 0.0

    def enter(self, stage: Stage) -> None:
        if stage == "checking":
            self.checking = time.perf_counter()
