"""Device and sizes of the checks; a dry run differs in nothing else."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kernels.gpu.launch import capability
from kernels.tiles import MAX_RANK
from lora.device import CudaDevice, Device
from tests.engine.gpu.fake_device import TOTAL_BYTES, FakeDevice

FP8_CAPABILITY = 89
DTYPES_ON_GPU = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class KernelSizes:
    """Sizes of the checks of kernels.

    hidden .. head_dim: those of a model, but with only some of its heads, since the reference on a
    CPU is slow.   head_dims: those of prefills on integers; each has other tiles.
    tokens: tokens of a step.   contexts: (positions, tokens of the step) of the rows that attend.
    batches: numbers of rows of steps; the largest batch contains the rows of the others.
    repeats: how often a launch is repeated.   exact: number of launches on integers.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dims: tuple[int, ...]
    vocab: int
    tokens: int
    contexts: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]
    repeats: int
    exact: int


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the checks of models.

    hidden .. vocab: those of random models.   steps: steps that two models are compared in.
    replays: replays of graphs.   max_num_seqs, max_model_len: limits of an engine.
    most_rows, most_tokens, most_rank: those of the largest steps.
    requests, names, slabs: requests and adapters of a `Churn`, and slabs of its arena.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    steps: int
    replays: int
    max_num_seqs: int
    max_model_len: int
    most_rows: int
    most_tokens: int
    most_rank: int
    requests: int
    names: int
    slabs: int


@dataclass(frozen=True)
class Setting:
    """Device, seed and sizes of a run.   dtypes: those of kernels; models have the first one."""

    device: Device
    seed: int
    dtypes: tuple[torch.dtype, ...]
    kernels: KernelSizes
    models: ModelSizes

    @property
    def dtype(self) -> torch.dtype:
        return self.dtypes[0]

    @property
    def there(self) -> torch.device:
        return self.device.torch_device

    @property
    def is_dry(self) -> bool:
        return isinstance(self.device, FakeDevice)

    @property
    def has_fp8(self) -> bool:
        return capability(self.there) >= FP8_CAPABILITY

    def rng(self, name: str) -> torch.Generator:
        """Random numbers that depend on the name and on the setting's seed."""
        return torch.Generator().manual_seed(self.seed_of(name))

    def seed_of(self, name: str) -> int:
        return (self.seed << 16) ^ zlib.crc32(name.encode())

    def finish(self) -> None:
        """Wait for everything that was launched."""
        self.device.synchronize(self.device.record(self.device.compute))


KERNELS_ON_GPU = KernelSizes(
    hidden=4096, intermediate=14336, heads=8, kv_heads=2, head_dim=128,
    head_dims=(64, 128, 256), vocab=128_256, tokens=150,
    contexts=(
        (1, 1), (17, 1), (512, 1), (513, 1), (1100, 1), (2700, 1),
        (2, 2), (150, 150), (333, 33), (700, 257), (1300, 5),
    ),
    batches=(1, 2, 17, 64), repeats=20, exact=50,
)  # fmt: skip
# 520 input features make a second chunk.
KERNELS_DRY = KernelSizes(
    hidden=520, intermediate=136, heads=4, kv_heads=2, head_dim=16,
    head_dims=(16, 32), vocab=133, tokens=7,
    contexts=((1, 1), (530, 1), (40, 33)), batches=(1, 2, 5), repeats=2, exact=2,
)  # fmt: skip
MODELS_ON_GPU = ModelSizes(
    hidden=512, intermediate=1408, layers=2, heads=8, kv_heads=4, head_dim=64, vocab=1000,
    steps=24, replays=100, max_num_seqs=16, max_model_len=256, most_rows=128,
    most_tokens=8192, most_rank=MAX_RANK,
    requests=500, names=40, slabs=44,
)  # fmt: skip
MODELS_DRY = ModelSizes(
    hidden=64, intermediate=160, layers=1, heads=2, kv_heads=1, head_dim=32, vocab=133,
    steps=3, replays=6, max_num_seqs=2, max_model_len=32, most_rows=2, most_tokens=32, most_rank=16,
    requests=4, names=6, slabs=12,
)  # fmt: skip


def on_gpu(seed: int, index: int = 0, is_quick: bool = False) -> Setting:
    """Setting on a CUDA device, whose compute stream becomes the current one of this thread.

    is_quick: with the same sizes, but fewer repetitions and cases.
    """
    there = torch.device("cuda", index)
    torch.cuda.set_device(there)
    device = CudaDevice(there)
    torch.cuda.set_stream(device.compute)
    kernels, models = KERNELS_ON_GPU, MODELS_ON_GPU
    if is_quick:
        kernels, models = replace(kernels, repeats=5, exact=12), replace(models, replays=25)
    return Setting(device, seed, DTYPES_ON_GPU, kernels, models)


def dry(seed: int) -> Setting:
    """Setting in Triton's interpreter, on a fake device that runs work late. It has no bfloat16,
    which the interpreter computes wrongly.
    """
    torch.set_num_threads(1)
    device = FakeDevice(seed)
    device.free_bytes = TOTAL_BYTES // 10 + (70 << 20)
    return Setting(device, seed, (torch.float16,), KERNELS_DRY, MODELS_DRY)


Check = Callable[[Setting], None]
"""A check, which raises AssertionError or any other error if it fails."""
