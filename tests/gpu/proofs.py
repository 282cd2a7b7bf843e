"""Proofs on the device: a served adapter matches its merged weights, in the device's own dtype."""

import hashlib
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from engine.core import EngineCore
from engine.models.config import DecoderConfig
from engine.proofs import merged
from engine.proofs.merged import MergedModel
from engine.proofs.proof import Compared, TokenSequence
from engine.wire.messages import ProofResult, ProveAdapter
from kernels.tiles import ADDRESS_UNIT_BYTES, RANK_ROWS
from lora.device import Device
from lora.layout import PROJECTIONS
from registry.ref import AdapterRef
from registry.uploads.proof import Proof
from tests.gpu.disk_engine import PackedStore, make_disk_engine
from tests.gpu.models import make_adapters, make_config, make_form, make_weights
from tests.gpu.setting import Check, Setting

_DOWN = PROJECTIONS.index("down_proj")


def proof_checks() -> dict[str, Check]:
    return {"engine.proofs.proof": _check}


class WeightsInMemory(dict[str, torch.Tensor]):
    """Weights of a model in host memory; see engine.proofs.merged.Weights."""

    def __init__(self, weights: dict[str, torch.Tensor], there: torch.device) -> None:
        super().__init__(weights)
        self.there = there

    def __getitem__(self, name: str) -> torch.Tensor:
        return super().__getitem__(name).to(self.there).float()

    def rows(self, name: str, start: int, end: int) -> torch.Tensor:
        return super().__getitem__(name)[start:end].to(self.there).float()

    def inputs(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x


def _check(setting: Setting) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, rng = Path(name), setting.rng("canary")
        config = make_config("llama", setting.models)
        form = make_form(config, setting.dtype)
        weights = make_weights(config, setting.dtype, rng)
        _, served, *_ = make_adapters(setting.models, config, setting.dtype, rng)
        store = PackedStore(folder / "cache", form)
        digest = hashlib.sha256(served).hexdigest()
        path = folder / "object"
        path.write_bytes(served)
        key = f"tenants/t/{digest}"
        store.put(key, path)
        _check_device(setting, config, weights, path)
        longest = setting.models.max_model_len
        numbers = WeightsInMemory(weights, setting.there)
        core = make_disk_engine(
            setting.device, config, form, weights, folder, setting.models.slabs,
            reference=MergedModel(numbers, config, device=setting.device),
            max_num_seqs=setting.models.max_num_seqs, max_model_len=longest,
            max_num_batched_tokens=longest,
        )  # fmt: skip
        adapter = AdapterRef("ad_1", 1, digest, key, 20, len(served))
        proof = _prove(core, adapter, path)
        assert proof.verdict == "passed", proof
        assert proof.tolerance < proof.max_effect, f"it proves nothing: {proof}"
        _spoil(core, key, setting.dtype)
        proof = _prove(core, adapter, path)
        assert proof.verdict == "mismatch", f"a wrong row in the arena was not found: {proof}"


def _check_device(
    setting: Setting, config: DecoderConfig, weights: dict[str, torch.Tensor], path: Path
) -> None:
    """The device computes what a CPU does, within float32's rounding, and in the memory that is
    kept for it.
    """
    there, is_cuda = setting.there, setting.there.type == "cuda"
    sequences = [TokenSequence(tuple(range(3, 3 + n)), 0) for n in (10, 22)]
    before = torch.cuda.memory_reserved(there) if is_cuda else 0
    found = _run(config, weights, there, setting.device, sequences, path)
    taken = torch.cuda.max_memory_reserved(there) - before if is_cuda else 0
    assert taken <= merged.scratch_bytes(config), f"it took {taken} bytes"
    expected = _run(config, weights, torch.device("cpu"), None, sequences, path)
    for ours, theirs in ((found.base, expected.base), (found.merged, expected.merged)):
        np.testing.assert_allclose(ours, theirs, atol=2e-4, rtol=5e-5)


def _run(
    config: DecoderConfig,
    weights: dict[str, torch.Tensor],
    there: torch.device,
    device: Device | None,
    sequences: list[TokenSequence],
    path: Path,
) -> Compared:
    steps = MergedModel(WeightsInMemory(weights, there), config, device=device).compare(
        sequences, path
    )
    while True:
        try:
            next(steps)
        except StopIteration as done:
            compared: Compared = done.value
            return compared


def _spoil(core: EngineCore, key: str, dtype: torch.dtype) -> None:
    """Multiply one rank row of B by -8, of the down projection of the last layer."""
    _, tables = core.adapters.tables(key)
    values = core.runner.arena.view(dtype).view(-1)
    num_inputs, num_outputs = core.scheduler.layout.shape.features(_DOWN)
    start = int(tables.tile_table[-1, _DOWN, 0]) * (ADDRESS_UNIT_BYTES // dtype.itemsize)
    values[start + RANK_ROWS * num_inputs :][:num_outputs] *= -8


def _prove(core: EngineCore, adapter: AdapterRef, path: Path) -> Proof:
    core.handle("gw", ProveAdapter(proof_id="p", adapter=adapter, object_path=str(path)))
    while True:
        for _, message in core.step():
            if isinstance(message, ProofResult):
                return message.proof
        time.sleep(0)  # the thread beside the steps runs meanwhile, as in an engine's process
