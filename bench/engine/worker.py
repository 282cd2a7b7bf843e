"""The engine in a process of its own, the other end of `bench.peers.worker`.

The engine is built as `python -m engine` builds it; adapters reach the arena by way of store,
fetcher and disk. Answers also hold "steps": (tokens, rows that chose a token) of each step. With
--processor-time, times are the worker's processor seconds.
"""

import argparse
import hashlib
import io
import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.adapters.tiers import Tiers, fetching
from bench.session import Ask, ProcessorClock, WallClock, run
from bench.step_log import StepLog
from engine.build import build_core
from engine.config import EngineConfig
from engine.core import EngineCore
from registry.base_model import BaseModel
from registry.peft_config import CONFIG_FILE
from registry.peft_format import WEIGHTS_FILE, write_canonical
from registry.ref import AdapterRef
from registry.validate import AdapterLimits, check_adapter

_WARM_UP = (1,) * 16
_QUOTA_BYTES = 4 << 30


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kernels", required=True)
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--processor-time", action="store_true")
    options = parser.parse_args()
    # Libraries print to stderr from here on: stdout is for the protocol only.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO)
    job = json.loads(sys.stdin.readline())
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        folder = Path(temporary)
        store = folder / "store"
        refs = {name: _register(job, Path(path), store) for name, path in job["adapters"].items()}
        with fetching(folder, store.as_uri(), quota_bytes=_QUOTA_BYTES) as tiers:
            core = _build(job, options, folder, tiers)
            # Warm up: every adapter is loaded into the arena, every buffer is touched once.
            run(core, [Ask(prompt_token_ids=_WARM_UP, max_tokens=4)])
            run(core, [Ask(_WARM_UP, 4, adapter=ref) for ref in refs.values()])
            out.write(json.dumps({"version": f"torch {torch.__version__}"}) + "\n")
            for line in sys.stdin:
                clock = ProcessorClock() if options.processor_time else WallClock()
                answer = _serve(core, json.loads(line)["requests"], refs, clock)
                out.write(json.dumps(answer) + "\n")


def _register(job: Mapping[str, Any], folder: Path, store: Path) -> AdapterRef:
    """Writes a PEFT folder into the store as an upload does, and returns its reference."""
    base = BaseModel.load(Path(job["model_dir"]), job["base_model"], store.parent / "base")
    checked = check_adapter(
        (folder / CONFIG_FILE).read_bytes(), folder / WEIGHTS_FILE, base, AdapterLimits()
    )
    written = io.BytesIO()
    with (folder / WEIGHTS_FILE).open("rb") as file:
        write_canonical(written, file, checked.header, checked.modules, checked.invocation_tokens)
    data = written.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    key = f"tenants/bench/{digest}"
    (store / key).parent.mkdir(parents=True, exist_ok=True)
    (store / key).write_bytes(data)
    return AdapterRef(folder.name, 1, digest, key, 16, len(data))


def _build(
    job: Mapping[str, Any], options: argparse.Namespace, folder: Path, tiers: Tiers
) -> EngineCore:
    torch.set_num_threads(job["threads"])
    config = EngineConfig(
        data_dir=str(folder),
        model_dir=job["model_dir"],
        base_revision="bench",
        vocabulary_path="",
        eos_token_ids=(0,),
        adapter_cache_dir=str(tiers.cache),
        fetcher_socket=str(tiers.socket),
        device="cpu",
        dtype="float32",
        arena_bytes=None,
        threads=job["threads"],
        max_model_len=None,
        quantization=None if job["precision"] == "float32" else job["precision"],
        batch_invariant=options.batch_invariant,
        cpu_kernels=options.kernels,
        speculation="off",  # random models repeat themselves: drafts would be right too often
        prefix_caching=False,  # repeated bursts must not find their prompts in the cache
    )
    return build_core(config, "bench", [])[0]


def _serve(
    core: EngineCore,
    requests: list[dict[str, Any]],
    refs: Mapping[str, AdapterRef],
    clock: WallClock,
) -> dict[str, Any]:
    asks = [
        Ask(
            prompt_token_ids=tuple(request["prompt_token_ids"]),
            max_tokens=request["max_tokens"],
            due_s=request["due_s"],
            adapter=refs.get(request["model"]),
        )
        for request in requests
    ]
    runner = core.runner
    log = StepLog.of(core)
    outcomes = run(core, asks, clock=clock)
    core.runner = runner
    answers = [{"token_ids": o.token_ids, "token_s": o.chunk_s} for o in outcomes]
    return {"answers": answers, "steps": log.steps}


if __name__ == "__main__":
    main()
