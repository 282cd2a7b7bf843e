"""Time to check an upload, beside reading its weights once and hashing them, the least work."""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.experiment import Experiment
from bench.in_process import EngineFactory
from bench.registry.memory import PeakMemory
from bench.registry.server import make_adapter
from bench.report import ratio, rounded
from registry.base_model import BaseModel
from registry.peft_config import CONFIG_FILE
from registry.peft_format import WEIGHTS_FILE
from registry.validate import AdapterLimits
from registry.validator import Validator

_READ_BYTES = 1 << 20
_TENANT = "bench"


@dataclass(frozen=True, kw_only=True)
class Validation(Experiment):
    """The time to check an upload.

    repeats: measurements of each, alternately, after one that does not count; medians count.
    """

    stack: str = "smollm2-135m"
    rank: int = 256
    repeats: int = 5

    def measure(self, factory: EngineFactory) -> dict[str, Any]:
        adapter = make_adapter(factory, self.rank, seed=0)
        config, weights = adapter / CONFIG_FILE, adapter / WEIGHTS_FILE
        target = factory.folder / "canonical.safetensors"
        base = BaseModel.load(factory.model_dir, factory.stack, factory.folder / "cache")
        validator = Validator(AdapterLimits())
        with PeakMemory(os.getpid()) as memory:
            turns = [
                (
                    _seconds(lambda: validator.check([base], _TENANT, config, weights, target)),
                    _seconds(lambda: validator.check([base], _TENANT, config, weights)),
                    _seconds(lambda: _hash(weights)),
                )
                for _ in range(self.repeats + 1)
            ]
        check_s, dry_s, hash_s = (median(times[1:]) for times in zip(*turns, strict=True))
        per_100mb = 100e6 / weights.stat().st_size
        return {
            "size_mb": rounded(weights.stat().st_size / 1e6),
            "check_s_per_100mb": rounded(check_s * per_100mb),
            "dry_run_s_per_100mb": rounded(dry_s * per_100mb),
            "sha256_s_per_100mb": rounded(hash_s * per_100mb),
            "check_to_sha256": ratio(check_s, hash_s),
            "peak_rss_mb": rounded(memory.validator_mb),
        }


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _hash(path: Path) -> str:
    hasher = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while part := file.read(_READ_BYTES):
            hasher.update(part)
    return hasher.hexdigest()
