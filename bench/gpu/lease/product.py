"""The whole product on a GPU: a random model on disk, `chorale serve`, pushes with their proofs, a
load by the client over HTTP, and a receipt.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.child import run_all
from bench.gpu.lease.checkpoint import write_adapter, write_model
from bench.gpu.lease.lease import Lease
from bench.gpu.lease.pack import FOLDER
from bench.gpu.lease.record import say
from bench.gpu.machine import DryRun, Gpu, Machine
from bench.gpu.rows import RowFile
from bench.load import run_load
from bench.outcome import Outcome
from bench.product import CHORALE, Product, ProductFailed, serving
from bench.report import rounded, summarize
from bench.workload import Lengths, Workload, make_requests
from tests.gpu.compiling import compile_all

_MODEL, _ADAPTERS, _RANK = "random-8b", ("one", "two"), 16
_TOKEN_IDS = 2048
"""Prompts have ids below this, which are those of the demo's tokenizer."""
_PREPARE_S = 120.0
_TIMEOUT_S = 60.0
_SETTLED_S = 10.0
_RATE = 20.0


def _site(lease: Lease) -> Path:
    """Folder of the packages that were taken along."""
    return lease.folder / "site"


def _adapter(lease: Lease, name: str) -> Path:
    return lease.folder / "adapters" / name


def prepare(lease: Lease) -> None:
    """Write model and adapters, unpack the packages and compile kernels, all side by side."""
    works = {"checkpoint": partial(_write, lease)}
    if not lease.is_dry:
        works |= {
            "packages": partial(_unpack, _site(lease)),
            "kernels": partial(compile_all, lease.arch, say),
        }
    failed = []
    for name, ended in run_all(works.items(), len(works), _PREPARE_S):
        say(f"{name}: {ended.failure or 'ok'}, {ended.seconds:.1f} s\n{ended.said}")
        failed += [name] if ended.failure else []
    assert not failed, f"failed: {failed}"


def _unpack(site: Path) -> None:
    wheels = [str(path) for path in FOLDER.glob("*.whl")]
    assert wheels, f"{FOLDER} has no packages: make gpu-pack"
    options = ("--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(site))
    subprocess.run((sys.executable, "-m", "pip", "install", *options, *wheels), check=True)


def _write(lease: Lease) -> None:
    machine: Machine = DryRun() if lease.is_dry else Gpu()
    shape = replace(machine.shape, num_layers=machine.pick(32, 2))
    vocab_size = machine.pick(machine.vocab_size, 2 * _TOKEN_IDS)
    write_model(machine, lease.folder / _MODEL, shape, vocab_size)
    for seed, name in enumerate(_ADAPTERS):
        write_adapter(_adapter(lease, name), shape, _RANK, seed)


def show_product(lease: Lease) -> None:
    """Serve the model, push the adapters, measure a load; print each figure when it is known."""
    os.environ["PYTHONPATH"] = os.pathsep.join((str(_site(lease)), os.getcwd()))
    own = {"device": "cpu", "dtype": "float32", "arena_bytes": 1 << 28} if lease.is_dry else {}
    settings = {"model": str(lease.folder / _MODEL), "device": "cuda", **own}
    # The log lies where every line of it is kept.
    (lease.folder / "chorale.log").symlink_to(lease.record.folder.absolute() / "server.log")
    start_s = time.perf_counter()
    with serving(settings, lease.folder) as product:
        result: dict[str, Any] = {"ready_s": _since(start_s)}
        say(f"ready after {result['ready_s']} s")
        key = product.create_tenant("lease")
        for name in _ADAPTERS:
            start_s = time.perf_counter()
            folder = str(_adapter(lease, name))
            say(_chorale(product, key, "adapters", "push", folder, "--name", name))
            result[f"pushed_{name}_s"] = _since(start_s)
            say(f"{name}: pushed and proved in {result[f'pushed_{name}_s']} s")
        outcomes = _load(product, key, lease.is_dry)
        result |= summarize(outcomes, _MODEL)
        result = {"correct": not result["errors"], **result}
        setup = {"model": _MODEL, "adapters": len(_ADAPTERS), "rank": _RANK, "rate": _RATE}
        RowFile(lease.rows, lease.device).add("gpu.product", setup, result)
        say(str(result))
        say(_check_receipt(product, key, lease.folder))
    assert result["correct"], f"requests failed: {result['errors']}"


def _load(product: Product, key: str, is_dry: bool) -> list[Outcome]:
    """Send requests when they are due, to the base model and to the adapters alike."""
    workload = Workload(
        base_model=_MODEL, models=(_MODEL, *_ADAPTERS), popularity="uniform", rate=_RATE,
        num_requests=6 if is_dry else 400, vocab_size=_TOKEN_IDS,
        prompt_tokens=Lengths(8, 16) if is_dry else Lengths(128, 512),
        output_tokens=Lengths(4, 4) if is_dry else Lengths(32, 128),
    )  # fmt: skip
    keys = dict.fromkeys(workload.models, key)
    return asyncio.run(run_load(product.url, keys, make_requests(workload), _TIMEOUT_S))


def _check_receipt(product: Product, key: str, folder: Path) -> str:
    """Have the command line verify the receipt of one more request."""
    body = {"model": _ADAPTERS[0], "prompt": [5, 6, 7], "max_tokens": 4}
    answer = product.call("POST", "/v1/completions", key, json=body)
    documents = {"receipt": f"/v1/receipts/{answer['id']}", "keys": "/v1/receipts/keys"}
    for name, path in documents.items():
        (folder / name).write_text(json.dumps(_get_settled(product, key, path)))
    return _chorale(
        product, key, "receipts", "verify", str(folder / "receipt"), "--key", str(folder / "keys")
    )


def _get_settled(product: Product, key: str, path: str) -> dict[str, Any]:
    """Get a document, which is missing until the request is settled. Raises ProductFailed."""
    deadline = time.monotonic() + _SETTLED_S
    while True:
        try:
            return product.call("GET", path, key)
        except ProductFailed:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _chorale(product: Product, key: str, *arguments: str) -> str:
    """Run a command of `chorale` as the key's owner, and return its output."""
    own = {"CHORALE_API_KEY": key, "CHORALE_URL": product.url}
    done = subprocess.run(
        (*CHORALE, *arguments), env={**os.environ, **own}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def _since(start_s: float) -> float:
    return rounded(time.perf_counter() - start_s)
