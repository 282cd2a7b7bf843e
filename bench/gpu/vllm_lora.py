"""vLLM's LoRA kernels beside ours. To run them, copy vLLM's files
`vllm/lora/ops/triton_ops/*.py` to the folder `.bench_ref` of this repository, which git ignores.

They run without the rest of vLLM: stand-ins for their imports are made below, for 0.33.0. As in
vLLM, every adapter takes the room of the highest rank, and the intermediate result is cleared
before a shrink.
"""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from bench.gpu.lora_chain import Project
from bench.gpu.lora_torch import Stacked
from kernels.work import Site

_FOLDER = Path(__file__).parent.parent.parent / ".bench_ref"
_OPS = "vllm.lora.ops.triton_ops"


@dataclass(frozen=True)
class VllmLoRA:
    """vLLM's kernels. shrink, expand, utils: modules of vLLM."""

    shrink: ModuleType
    expand: ModuleType
    utils: ModuleType

    def system(self, stacked: Stacked, sites: Sequence[Site]) -> Project:
        # vLLM's caches have addresses as keys, which belong to another row's matrices by now.
        self.utils._LORA_A_PTR_DICT.clear()
        self.utils._LORA_B_PTR_DICT.clear()
        matrices = {(s.layer, s.projections): _slices(stacked, s) for s in sites}
        steps = _step(stacked.slots)

        def project(x: torch.Tensor, weight: torch.Tensor, site: Site) -> Any:
            a, b = matrices[site.layer, site.projections]
            y = x @ weight.T
            h = torch.empty(len(a), len(x), a[0].shape[1], dtype=torch.float32, device=x.device)
            self.shrink.lora_shrink(x, a, h, *steps, 1.0)
            self.expand.lora_expand(h, b, y, *steps, offset_start=0, add_inputs=True)
            return y, None

        return project


def find(folder: Path = _FOLDER) -> VllmLoRA | None:
    """Return vLLM's kernels, or None if their files are not in `folder`."""
    if not (folder / _OPS.replace(".", "/") / "lora_shrink_op.py").exists():
        return None
    if _OPS not in sys.modules:
        _make_up_vllm(folder)
    names = ("lora_shrink_op", "lora_expand_op", "utils")
    return VllmLoRA(*(importlib.import_module(f"{_OPS}.{name}") for name in names))


def _slices(stacked: Stacked, site: Site) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return A of every projection, [adapters, rank, in], and B, [adapters, out, rank]."""
    a, bs = stacked.matrices(site)
    return [x.contiguous() for x in a.unbind(1)], [b.transpose(1, 2).contiguous() for b in bs]


def _step(slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the adapters of tokens in the form of LoRAKernelMeta; every token has an adapter.

    slots: [T], ascending.
    """
    ids, counts = slots.unique_consecutive(return_counts=True)
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    tokens = torch.arange(len(slots), device=slots.device)
    return (
        slots.int(),
        tokens.int(),
        counts.int(),
        starts.int(),
        ids.int(),
        torch.tensor([False]),
        torch.tensor([len(ids)], dtype=torch.int32),
    )


def _make_up_vllm(folder: Path) -> None:
    """Make vLLM's packages without their contents, and the few names that the kernels import."""
    for depth in range(1, len(_OPS.split(".")) + 1):
        name = ".".join(_OPS.split(".")[:depth])
        package = ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
    platform = SimpleNamespace(
        is_cuda_alike=lambda: True,
        is_cuda=lambda: True,
        is_device_capability=lambda *_: False,
        has_device_capability=lambda *_: True,
    )
    made_up = {
        "vllm.triton_utils": {"triton": triton, "tl": tl, "HAS_TRITON": True},
        "vllm.envs": {"__getattr__": _unset},
        "vllm.logger": {"init_logger": lambda _: SimpleNamespace(**_silent())},
        "vllm.platforms": {"current_platform": platform},
        "vllm.utils": {},
        "vllm.utils.torch_utils": {
            "direct_register_custom_op": _register_nothing,
            "async_tensor_h2d": _to_device,
        },
        "vllm.utils.math_utils": {"next_power_of_2": triton.next_power_of_2},
    }
    for name, contents in made_up.items():
        module = ModuleType(name)
        vars(module).update(contents)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, module)


def _silent() -> dict[str, Any]:
    levels = ("debug", "info", "warning", "error", "info_once", "warning_once")
    return dict.fromkeys(levels, lambda *_, **__: None)


def _register_nothing(**_: Any) -> None:
    """Raise AttributeError, so that vLLM's files use their plain functions instead."""
    raise AttributeError


def _unset(name: str) -> None:
    """Return None for every variable of the environment, which means false, and no folder."""
    if name.startswith("__"):
        raise AttributeError(name)


def _to_device(values: Any, device: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)
