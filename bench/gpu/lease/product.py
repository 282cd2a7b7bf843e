"""The whole product on a GPU: a random model on disk, `chorale serve`, pushes with their proofs, a
load by the client over HTTP without adapters and with them, and a receipt.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.checkpoint import write_adapter
from bench.child import run_all, run_module
from bench.gpu.lease.checkpoint import write_model
from bench.gpu.lease.lease import Lease
from bench.gpu.lease.pack import FOLDER
from bench.gpu.machine import DryRun, Gpu, Machine
from bench.load import run_load
from bench.product import CHORALE, Product, ProductFailed, serving
from bench.report import rounded, summarize
from bench.workload import make_requests

_MODEL, _RANK = "random-8b", 16
_ADAPTERS, _DRY_ADAPTERS = 32, 2
_TOKEN_IDS = 2048
"""Prompts have ids below this, which are those of the demo's tokenizer."""
_PREPARE_S = 120.0
_TIMEOUT_S = 60.0
_SETTLED_S = 10.0
_PUSHES_AT_ONCE, _PUSHES_S = 4, 80.0
"""Pushes side by side, and seconds after which no more are begun."""


def prepare(lease: Lease) -> None:
    """Write model and adapters, unpack the packages and compile kernels, all side by side."""
    works = {"checkpoint": partial(_write, lease)}
    if not lease.is_dry:
        works |= {
            "packages": partial(_unpack, _site(lease)),
            "kernels": partial(run_module, "tests.gpu.compiling"),
        }
    failed = []
    for name, ended in run_all(works.items(), len(works), _PREPARE_S):
        _say(f"{name}: {ended.failure or 'ok'}, {ended.seconds:.1f} s\n{ended.said}")
        failed += [name] if ended.failure else []
    assert not failed, f"failed: {failed}"


def _site(lease: Lease) -> Path:
    """Folder of the packages that were taken along."""
    return lease.large / "site"


def _adapter(lease: Lease, name: str) -> Path:
    return lease.large / "adapters" / name


def _names(lease: Lease) -> list[str]:
    return [f"a{number}" for number in range(_DRY_ADAPTERS if lease.is_dry else _ADAPTERS)]


def _unpack(site: Path) -> None:
    wheels = [str(path) for path in FOLDER.glob("*.whl")]
    assert wheels, f"{FOLDER} has no packages: make gpu-pack"
    options = ("--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(site))
    subprocess.run((sys.executable, "-m", "pip", "install", *options, *wheels), check=True)


def _write(lease: Lease) -> None:
    machine: Machine = DryRun() if lease.is_dry else Gpu()
    shape = replace(machine.shape, num_layers=machine.pick(32, 2))
    vocab_size = machine.pick(machine.vocab_size, 2 * _TOKEN_IDS)
    write_model(machine, lease.large / _MODEL, shape, vocab_size)
    for name in _names(lease):
        write_adapter(_adapter(lease, name), shape, _RANK, machine.randn)


def show_product(lease: Lease) -> None:
    """Serve the model, measure a load on it, push adapters, and measure the same load on those."""
    os.environ["PYTHONPATH"] = os.pathsep.join((str(_site(lease)), os.getcwd()))
    own = {"device": "cpu", "dtype": "float32", "arena_bytes": 1 << 28} if lease.is_dry else {}
    settings = {"model": str(lease.large / _MODEL), "device": "cuda", **own}
    # The log lies where every line of it is kept.
    (lease.large / "chorale.log").symlink_to(lease.folder.absolute() / "server.log")
    start_s = time.perf_counter()
    with serving(settings, lease.large) as product:
        ready_s = _since(start_s)
        _say(f"ready after {ready_s} s")
        key = product.create_tenant("lease")
        base = _measure(lease, product, key, [], {"ready_s": ready_s})
        start_s = time.perf_counter()
        pushed = _push(lease, product, key, start_s)
        assert pushed, "no adapter was pushed"
        shown = {"pushed_s": _since(start_s), "base_tokens_per_s": base["output_tokens_per_s"]}
        _measure(lease, product, key, pushed, shown)
        _say(_check_receipt(product, key, pushed[0], lease.large))


def _push(lease: Lease, product: Product, key: str, start_s: float) -> list[str]:
    """Push adapters, each with its proof, while there is time; return their names."""

    def push(name: str) -> list[str]:
        if not lease.is_dry and _since(start_s) > _PUSHES_S:
            return []
        _say(_chorale(product, key, "adapters", "push", str(_adapter(lease, name)), "--name", name))
        return [name]

    with ThreadPoolExecutor(_PUSHES_AT_ONCE) as threads:
        return sum(threads.map(push, _names(lease)), [])


def _measure(
    lease: Lease, product: Product, key: str, adapters: list[str], shown: dict[str, Any]
) -> dict[str, Any]:
    """Send requests that all come at once, and write their row.   shown: further figures of it."""
    count, tokens = (6, "8") if lease.is_dry else (128, "200")
    requests = make_requests(_MODEL, adapters, _TOKEN_IDS, count, tokens, tokens, popularity="zipf")
    keys = dict.fromkeys((_MODEL, *adapters), key)
    outcomes = asyncio.run(run_load(product.url, keys, requests, _TIMEOUT_S))
    result = summarize(outcomes, _MODEL)
    result = {"correct": not result["errors"], **shown, **result}
    setup = {
        "model": _MODEL, "adapters": len(adapters), "rank": _RANK if adapters else 0,
        "requests": count, "tokens": tokens,
    }  # fmt: skip
    lease.rows.add("gpu.product", setup, result)
    _say(str(result))
    assert result["correct"], f"requests failed: {result['errors']}"
    return result


def _check_receipt(product: Product, key: str, adapter: str, folder: Path) -> str:
    """Have the command line verify the receipt of one more request."""
    body = {"model": adapter, "prompt": [5, 6, 7], "max_tokens": 4}
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


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
