"""Small canonical objects, and a fetcher process over any store."""

import contextlib
import hashlib
import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from lora.layout import Layout, ModelShape
from lora.packed import PackedForm
from registry.formats.peft_format import (
    CanonicalAdapter,
    ModuleScale,
    TensorInfo,
    canonical_header,
    lora_names,
)
from registry.ref import AdapterRef

SHAPE = ModelShape(2, 64, 160, 4, 2, 16)
FORM = PackedForm(Layout.of(SHAPE, 4), "float32", "base-1")
DEADLINE_S = 30.0


def make_object(seed: int = 0, rank: int = 8, shape: ModelShape = SHAPE) -> bytes:
    """A canonical object with random weights on one projection of every layer."""
    random = np.random.default_rng(seed)
    tensors, scales = {}, {}
    for layer in range(shape.num_layers):
        module = f"model.layers.{layer}.mlp.up_proj"
        scales[module] = ModuleScale(rank, 0.5)
        for name, size in zip(
            lora_names(module),
            [(rank, shape.hidden_size), (shape.intermediate_size, rank)],
            strict=True,
        ):
            tensors[name] = random.random(size, np.float32)
    infos = {n: TensorInfo("F32", t.shape, 0, t.nbytes) for n, t in tensors.items()}
    header = canonical_header(CanonicalAdapter(scales, infos))
    return header + b"".join(tensors[name].tobytes() for name in sorted(tensors))


def make_ref(data: bytes, key: str = "k") -> AdapterRef:
    return AdapterRef("a", 1, hashlib.sha256(data).hexdigest(), key, 8, len(data))


def put_object(s3: Any, key: str, data: bytes) -> AdapterRef:
    """Put an object into the store behind a tests.faulty_s3.FaultyS3, which sees nothing of it."""
    store = http.client.HTTPConnection(urlsplit(s3.upstream).netloc, timeout=DEADLINE_S)
    with contextlib.closing(store):
        store.request("PUT", f"/bucket/{key}", data)
        assert store.getresponse().status == 200
    return make_ref(data, key)


def wait_for(condition: Callable[[], Any]) -> Any:
    """Poll a condition, and return its value as soon as that is true."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        if value := condition():
            return value
        time.sleep(0.005)
    raise AssertionError("it never came")


class FetcherProcess:
    """A process of `python -m lora.fetch` that listens on its socket."""

    def __init__(
        self,
        folder: Path,
        storage: str,
        *,
        quota_bytes: int = 10_000_000,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.path = folder / "fetch.sock"
        self.cache = folder / "cache"
        self._command = [sys.executable, "-m", "lora.fetch", "--socket", str(self.path)]
        self._command += ["--storage", storage, "--cache", str(self.cache)]
        self._command += ["--quota-bytes", str(quota_bytes), "--max-fetches", "8"]
        self._environment = os.environ | (environment or {})
        self.start()

    def start(self) -> None:
        self.path.unlink(missing_ok=True)
        self.process = subprocess.Popen(self._command, env=self._environment)
        try:
            wait_for(self._listens)
        except AssertionError:
            self.kill()
            raise

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def files(self) -> list[str]:
        """Names of the files in the cache, without the lock."""
        return sorted(path.name for path in self.cache.iterdir() if path.name != ".lock")

    def _listens(self) -> bool:
        assert self.process.poll() is None, "the fetcher ended"
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.path)) == 0
