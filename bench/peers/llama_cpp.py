"""llama.cpp's server over HTTP, each request with its adapter in its `lora` field.

A decode batch of the server holds requests of one adapter at a time. KV is float16, the server's
default: float32 is 10 % slower (21.2 tokens a CPU second against 23.4) and no nearer to the
reference.
"""

import asyncio
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.checkpoint import THREADS
from bench.load import run_load
from bench.outcome import Outcome
from bench.peers.gguf_files import convert_adapter, convert_model
from bench.peers.peer import PeerFailed, Setting
from bench.product import ProductFailed, free_port, started, wait_ready
from bench.workload import BenchRequest, warm_up_requests

_WEIGHTS = {"float32": "f32", "q8_0": "q8_0"}
"""Forms of weights by precision."""
_SLOTS = 32
_SLOT_TOKENS = 512  # context of a slot
_CHUNK_TIMEOUT_S = 900.0


class LlamaCpp:
    """Implements bench.peers.peer.Peer. scripts: the folder with convert_*_to_gguf.py."""

    system = "llama.cpp server"
    precisions = tuple(_WEIGHTS)

    def __init__(self, server: Path, scripts: Path) -> None:
        self._server = server
        self._scripts = scripts

    def missing(self) -> str | None:
        if not self._server.name:
            return "llama_server names no binary"
        needed = (self._server, self._scripts / "convert_lora_to_gguf.py")
        return next((f"there is no {path}" for path in needed if not path.exists()), None)

    @contextmanager
    def serving(self, setting: Setting) -> Iterator["LlamaServer"]:
        log, port = setting.folder / "llama-server.log", free_port()
        command = self._command(setting) + ["--host", "127.0.0.1", "--port", str(port)]
        with started(command, log, {}) as process:
            url = f"http://127.0.0.1:{port}"
            server = LlamaServer(process.pid, self._version(), url, setting)
            try:
                wait_ready(url, process, log, path="/health")
            except ProductFailed as failed:
                raise PeerFailed(str(failed)) from None
            server.serve(warm_up_requests(setting.checkpoint.models))
            yield server

    def _command(self, setting: Setting) -> list[str]:
        model_dir, form = setting.checkpoint.model_dir, _WEIGHTS[setting.precision]
        model = convert_model(self._scripts, model_dir, form, setting.folder)
        command = [
            str(self._server), "--model", str(model), "--no-webui",
            "--threads", str(THREADS), "--threads-batch", str(THREADS),
            "--parallel", str(_SLOTS), "--ctx-size", str(_SLOTS * _SLOT_TOKENS),
        ]  # fmt: skip
        adapters = [
            str(convert_adapter(self._scripts, model_dir, adapter, setting.folder))
            for adapter in setting.checkpoint.adapters.values()
        ]
        if adapters:
            command += ["--lora", ",".join(adapters), "--lora-init-without-apply"]
        return command

    def _version(self) -> str:
        done = subprocess.run(
            (str(self._server), "--version"), capture_output=True, text=True, check=True
        )
        found = re.search(r"version: (.*)", done.stdout + done.stderr)
        return f"llama.cpp {found[1]}" if found else "llama.cpp"


class LlamaServer:
    """Implements bench.peers.peer.Server."""

    def __init__(self, pid: int, version: str, url: str, setting: Setting) -> None:
        self.pid = pid
        self.version = version
        self._url = url
        self._checkpoint = setting.checkpoint

    def serve(self, requests: Sequence[BenchRequest]) -> list[Outcome]:
        keys = dict.fromkeys(self._checkpoint.models, "none")
        load = run_load(self._url, keys, requests, _CHUNK_TIMEOUT_S, self._body, "/completion")
        return asyncio.run(load)

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        body = {
            "prompt": request.prompt_token_ids,
            "n_predict": request.max_tokens,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }
        # `lora` is always sent: a request without it gets every adapter at once, whatever the
        # server was started with.
        named = enumerate(self._checkpoint.adapters)
        return body | {"lora": [{"id": i, "scale": float(n == request.model)} for i, n in named]}
