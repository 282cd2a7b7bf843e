"""An engine in this process with a checkpoint's adapters in its arena, built as `python -m engine`
builds it; adapters reach the arena by way of store, fetcher and disk.
"""

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.adapters.tiers import fetching
from bench.checkpoint import Checkpoint
from bench.in_process import EngineFactory
from bench.outcome import Outcome
from bench.session import Ask, WallClock, run
from bench.workload import BenchRequest
from engine.core import EngineCore
from registry.base.base_model import BaseModel
from registry.checks.validate import AdapterLimits, check_adapter
from registry.formats.peft_config import CONFIG_FILE
from registry.formats.peft_format import WEIGHTS_FILE, write_canonical
from registry.ref import AdapterRef

_WARM_UP = (1,) * 16
_QUOTA_BYTES = 4 << 30


@dataclass(frozen=True)
class LoadedEngine:
    """A warm engine.   refs: its adapters by name."""

    core: EngineCore
    refs: Mapping[str, AdapterRef]

    def serve(
        self, requests: Sequence[BenchRequest], clock: WallClock | None = None
    ) -> list[Outcome]:
        asks = [
            Ask(
                prompt_token_ids=tuple(request.prompt_token_ids),
                max_tokens=request.max_tokens,
                due_s=request.due_s,
                adapter=self.refs.get(request.model),
            )
            for request in requests
        ]
        return run(self.core, asks, clock)


@contextmanager
def loaded_engine(
    checkpoint: Checkpoint, folder: Path, precision: str, **settings: Any
) -> Iterator[LoadedEngine]:
    """Run an engine and its fetcher, their files under `folder`.

    precision: float32, or a value of the engine's `quantization`.   settings: of EngineConfig.
    """
    store = folder / "store"
    refs = {name: _register(checkpoint, path, store) for name, path in checkpoint.adapters.items()}
    with fetching(folder, store.as_uri(), quota_bytes=_QUOTA_BYTES) as tiers:
        core = EngineFactory(checkpoint, folder).make_cold(
            adapter_cache_dir=str(tiers.cache),
            fetcher_socket=str(tiers.socket),
            arena_bytes=None,
            max_model_len=None,
            quantization=None if precision == "float32" else precision,
            prefix_caching=False,  # repeated bursts must not find their prompts in the cache
            **settings,
        )
        # Every adapter is loaded into the arena, every buffer is touched once.
        run(core, [Ask(_WARM_UP, 4)])
        run(core, [Ask(_WARM_UP, 4, adapter=ref) for ref in refs.values()])
        yield LoadedEngine(core, refs)


def _register(checkpoint: Checkpoint, folder: Path, store: Path) -> AdapterRef:
    """Write a PEFT folder into the store as an upload does, and return its reference."""
    base = BaseModel.load(checkpoint.model_dir, checkpoint.base_model, store.parent / "base")
    config, written = (folder / CONFIG_FILE).read_bytes(), io.BytesIO()
    with (folder / WEIGHTS_FILE).open("rb") as file:
        checked = check_adapter(config, file, base, AdapterLimits())
        write_canonical(written, file, checked.adapter)
    data = written.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    key = f"tenants/bench/{digest}"
    (store / key).parent.mkdir(parents=True, exist_ok=True)
    (store / key).write_bytes(data)
    return AdapterRef(folder.name, 1, digest, key, 16, len(data))
