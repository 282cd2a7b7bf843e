"""Adapters are loaded, evicted and used while steps run, and each forces its own token: the load
of tests.engine.churn with its engine on the device, and packed files on disk instead of a fetcher.
"""

import tempfile
from pathlib import Path

from engine.core import EngineCore
from tests.engine.churn import CONFIG, NUM_SWAP_SLOTS, Churn, make_weights
from tests.gpu.disk_engine import PackedStore, make_disk_engine
from tests.gpu.models import make_form
from tests.gpu.setting import Check, Setting

_ALLOWED = {"max_tokens", "aborted", "adapter_missing"}
_DEADLINE_S = 900.0  # only a hang takes longer; a dry run is slow on a busy machine
_MOST_ROUNDS = 20
_HOST_SLABS = 20
_LIMITS = {"max_model_len": 112, "max_num_batched_tokens": 96}  # the longest request has 102


def cold_load_checks() -> dict[str, Check]:
    return {"engine.cold_loads": _check}


def _check(setting: Setting) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, sizes = Path(name), setting.models
        form = make_form(CONFIG, setting.dtype)
        core = make_disk_engine(
            setting.device, CONFIG, form, make_weights(), folder, sizes.slabs, NUM_SWAP_SLOTS,
            host_cache_bytes=_HOST_SLABS * form.layout.slab_bytes,
            max_num_seqs=sizes.max_num_seqs, **_LIMITS,
        )  # fmt: skip
        store = PackedStore(folder / "cache", form)
        churn = Churn(
            core, store, folder, setting.seed, num_names=sizes.names,  # type: ignore[arg-type]
            most_open=2 * sizes.max_num_seqs,
        )  # fmt: skip
        num_requests = 0
        while not _has_seen_all(core):
            num_requests += sizes.requests
            assert num_requests <= _MOST_ROUNDS * sizes.requests, "it is not much of a churn"
            churn.run(num_requests, _DEADLINE_S)
            assert not churn.wrong, f"wrong tokens: {churn.wrong}"
        assert set(churn.outcomes) <= _ALLOWED, f"requests ended so: {churn.outcomes}"
        assert churn.outcomes["max_tokens"] > num_requests / 2, f"{churn.outcomes}"


def _has_seen_all(core: EngineCore) -> bool:
    queues = core.scheduler.queues
    return bool(core.adapters.machine.num_evictions and queues.num_preemptions and queues.num_swaps)
