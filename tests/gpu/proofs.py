"""Proofs on the device: a served adapter matches its merged weights, in the device's own dtype."""

import hashlib
import tempfile
from pathlib import Path

import torch

from engine.core import EngineCore
from engine.merged import MergedModel
from engine.messages import ProofResult, ProveAdapter
from registry.proof import Proof
from registry.ref import AdapterRef
from tests.gpu.disk_engine import PackedStore, make_disk_engine
from tests.gpu.models import make_adapters, make_config, make_form, make_weights
from tests.gpu.setting import Check, Setting

_MOST_STEPS = 20_000


def proof_checks() -> dict[str, Check]:
    return {"engine.proof": _check}


class WeightsInMemory(dict[str, torch.Tensor]):
    """Weights of a model in memory; see engine.merged.Weights."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return super().__getitem__(name).float()

    def rows(self, name: str, start: int, end: int) -> torch.Tensor:
        return self[name][start:end]


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
        longest = setting.models.max_model_len
        core = make_disk_engine(
            setting.device, config, form, weights, folder, setting.models.slabs,
            reference=MergedModel(WeightsInMemory(weights), config),
            max_num_seqs=setting.models.max_num_seqs, max_model_len=longest,
            max_num_batched_tokens=longest,
        )  # fmt: skip
        adapter = AdapterRef("ad_1", 1, digest, key, 20, len(served))
        proof = _prove(core, adapter, path)
        assert proof.verdict == "passed", proof
        assert proof.tolerance < proof.max_effect, f"it proves nothing: {proof}"


def _prove(core: EngineCore, adapter: AdapterRef, path: Path) -> Proof:
    core.handle("gw", ProveAdapter(proof_id="p", adapter=adapter, object_path=str(path)))
    for _ in range(_MOST_STEPS):
        for _, message in core.step():
            if isinstance(message, ProofResult):
                return message.proof
    raise AssertionError("no verdict")
