"""Adapters that are loaded, evicted and used while steps run, each forcing its own token: the churn
of tests.engine.churn with its engine on the device, packed files on disk instead of a fetcher.
"""

import tempfile
from pathlib import Path

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.gpu.backend import assemble
from engine.journal import Journal
from engine.meter import TokenMeter
from engine.scheduler import Scheduler
from engine.swap import PreemptionCosts, SwapSpace
from kernels.gpu import ops
from lora.arena import Arena
from lora.disk_cache import packed_path
from lora.errors import Failure
from lora.loader import ThreadLoader
from lora.loads import Loaded
from lora.manager import AdapterManager
from lora.packed import PackedForm
from lora.packing import pack
from registry.ref import AdapterRef
from tests.engine.churn import CONFIG, NUM_CODES, NUM_SWAP_SLOTS, Churn, make_weights
from tests.gpu.models import make_form
from tests.gpu.setting import Check, Setting
from tests.gpu.stage import make_engine_config

_ALLOWED = {"max_tokens", "aborted", "adapter_missing"}
_DEADLINE_S = 120.0
_MOST_ROUNDS = 20
_MAX_MODEL_LEN = 112  # the longest request has 102


def cold_load_checks() -> dict[str, Check]:
    return {"engine.cold_loads": _check}


class PackedStore:
    """Packs what is put there, in a folder as the fetcher's cache."""

    def __init__(self, root: Path, form: PackedForm) -> None:
        self.root, self.form = root, form
        root.mkdir()

    def put(self, key: str, path: Path) -> None:
        with self._path(key).open("wb") as file:
            pack(path, key.rpartition("/")[2], self.form, file)

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return packed_path(self.root, key.rpartition("/")[2], self.form.form_id)


class DiskLoader(ThreadLoader):
    """Where no fetcher is: an adapter is on disk, or nowhere."""

    def fetch(self, ref: AdapterRef) -> None:
        is_there = packed_path(self.cache_dir, ref.digest, self.form.form_id).exists()
        failure = None if is_there else Failure("missing", "no such file")
        self._done.put(Loaded(ref.object_key, "disk", failure=failure, was_there=True))


def _check(setting: Setting) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, sizes = Path(name), setting.models
        form = make_form(CONFIG, setting.dtype)
        core = _build_core(setting, form, folder)
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
    return bool(core.adapters.num_evictions and queues.num_preemptions and queues.num_swaps)


def _build_core(setting: Setting, form: PackedForm, folder: Path) -> EngineCore:
    sizes, layout = setting.models, form.layout
    limits = {"max_model_len": _MAX_MODEL_LEN, "max_num_seqs": sizes.max_num_seqs}
    limits["max_num_batched_tokens"] = 96
    weights = {name: tensor.to(setting.dtype) for name, tensor in make_weights().items()}
    config = make_engine_config(
        folder, CONFIG, form, arena_bytes=sizes.slabs * layout.slab_bytes, **limits
    )
    backend = assemble(config, CONFIG, form, weights, setting.device, ops)
    loader = DiskLoader(
        folder / "cache", folder / "no.sock", form, backend.slabs, device=setting.device
    )
    adapters = AdapterManager(
        Arena(sizes.slabs), loader, host_cache_bytes=20 * layout.slab_bytes, arena_is_host=False
    )
    costs = PreemptionCosts(copy_bytes_per_s=1e15)
    costs.note_prefill(1, 1.0)
    swap = SwapSpace(NUM_SWAP_SLOTS, layout.slab_bytes, costs)
    words = [b""] * (NUM_CODES + 1)
    scheduler = Scheduler(SchedulerConfig(**limits), layout, adapters, words, [], swap)
    runner = backend.make_runner(adapters.tables, TokenMeter(folder / "meter"), NUM_SWAP_SLOTS)
    return EngineCore(scheduler, runner, Journal(folder / "journal", "eng-1", form.base_revision))
