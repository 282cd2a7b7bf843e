"""Failed checks under several versions of ptxas, the assembler that Triton ends with."""

import math
import os
from collections.abc import Mapping
from functools import partial
from glob import glob
from pathlib import Path

import triton

from bench.child import run_all
from bench.gpu.lease.lease import Lease
from bench.gpu.lease.pack import FOLDER
from bench.gpu.lease.record import say
from tests.gpu import setting
from tests.gpu.checks import CHECKS
from tests.gpu.harness import Checks, run_check

_AT_ONCE = 4
_CHECK_S = 75.0
"""Limit of a check, which compiles its own kernels."""
_BUNDLED = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"


def find_ptxas() -> dict[str, str | None]:
    """Return the path of each ptxas: a carried one, the machine's newest, and Triton's, with which
    the checks have failed before.
    """
    machines = sorted(os.path.realpath(path) for path in glob("/usr/local/cuda*/bin/ptxas"))
    carried = FOLDER / "ptxas"
    return {
        "carried": str(carried) if carried.exists() else None,
        "of the machine": machines[-1] if machines else None,
        "of Triton": str(_BUNDLED) if _BUNDLED.exists() else None,
    }


def try_compilers(lease: Lease, checks: Mapping[str, int]) -> None:
    """Repeat checks with the kernels of each ptxas, and note in the record how each ended.

    checks: seeds by the checks' names.
    """
    for ptxas, path in find_ptxas().items():
        if path is None:
            say(f"there is no ptxas {ptxas}")
            continue
        os.environ["TRITON_PTXAS_PATH"] = path  # a part of the key of Triton's cache
        works = {
            name: partial(run_check, CHECKS[name], make_setting(seed, lease.is_dry))
            for name, seed in checks.items()
        }
        for name, ended in run_all(works.items(), _AT_ONCE, lease.limit_s(_CHECK_S)):
            lease.record.note_check(f"{name}, ptxas {ptxas}", ended)
            say(f"{name}, ptxas {ptxas}  {ended.failure or 'ok'}  {ended.seconds:.1f} s")
            say(ended.said)


def make_setting(seed: int, is_dry: bool) -> "partial[setting.Setting]":
    """Return a function that makes the setting of quick checks."""
    return partial(setting.dry, seed) if is_dry else partial(setting.on_gpu, seed, is_quick=True)


def sanitize(checks: Mapping[str, int]) -> None:
    """Repeat checks under compute-sanitizer, and print what it finds.   checks: see above."""
    # In torch's pool an access behind a tensor's end is no error. Checks of kernels capture no
    # graphs, which would need the pool.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    for name, seed in checks.items():
        harness = Checks(1, math.inf, say, failed=[name])
        harness.sanitize(("--quick", "--seed", str(seed)))
