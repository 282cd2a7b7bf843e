"""Engines in this process, each with a random model."""

import random
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.checkpoint import THREADS, Checkpoint, make_checkpoint
from bench.measurement import Figures, Measurement
from bench.session import Ask, run
from engine.build import build_core
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.models.config import DecoderConfig
from engine.models.weights import load_config
from lora.layout import Layout

DEVICE, DTYPE = "cpu", torch.float32
BASE_REVISION = "bench"
DTYPE_NAME = str(DTYPE).removeprefix("torch.")
_WARM_UP = 16  # tokens of the prompt, and as many of the answer


class EngineFactory:
    """Makes engines of one random model, each as `python -m engine` makes it, with cold caches.

    folder: holds all files.
    """

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        torch.set_num_threads(THREADS)
        self.folder = folder
        self.model_dir = checkpoint.model_dir
        self.vocab_size = checkpoint.vocab_size
        config = DecoderConfig.parse(load_config(self.model_dir))
        self.layout = Layout.of(config.shape, DTYPE.itemsize)
        self._num_engines = 0

    @classmethod
    def of(cls, stack: str, folder: Path) -> "EngineFactory":
        """Make a factory and its model.   stack: a shape of bench.checkpoint."""
        transformers.utils.logging.disable_progress_bar()
        return cls(make_checkpoint(stack, folder / "checkpoint", num_adapters=0), folder)

    def make(self, *, arena_tokens: int, **settings: Any) -> EngineCore:
        """Make an engine and warm it up with one short request. settings: of EngineConfig."""
        arena_bytes = self.layout.num_blocks(arena_tokens) * self.layout.slab_bytes
        core = self.make_cold(arena_bytes=arena_bytes, swap_bytes=0, **settings)
        run(core, [Ask(prompt_token_ids=(1,) * _WARM_UP, max_tokens=_WARM_UP)])
        return core

    def make_cold(self, **settings: Any) -> EngineCore:
        """Make an engine that has computed nothing yet. settings: of EngineConfig."""
        self._num_engines += 1
        data_dir = self.folder / f"engine-{self._num_engines}"
        data_dir.mkdir()
        config = EngineConfig(
            data_dir=str(data_dir),
            model_dir=str(self.model_dir),
            base_revision=BASE_REVISION,
            vocabulary_path="",
            eos_token_ids=(0,),
            device=DEVICE,
            dtype=DTYPE_NAME,
            threads=THREADS,
            **{
                "adapter_cache_dir": str(data_dir / "adapters"),
                "fetcher_socket": str(data_dir / "no-fetcher.sock"),
                # Random models repeat themselves, so that their drafts are better than people's.
                "speculation": "off",
                **settings,
            },
        )
        core, _ = build_core(config, f"bench-{self._num_engines}", [])
        return core

    def random_tokens(self, stream: random.Random, count: int) -> tuple[int, ...]:
        return tuple(stream.randrange(self.vocab_size) for _ in range(count))


@dataclass(frozen=True, kw_only=True)
class EngineMeasurement(Measurement):
    """A measurement of engines in this process.   stack: the model's shape, of bench.checkpoint."""

    stack: str

    def setup(self) -> Figures:
        return super().setup() | {"device": DEVICE, "dtype": DTYPE_NAME, "threads": THREADS}

    def measure(self, folder: Path) -> Figures:
        return self.run(EngineFactory.of(self.stack, folder))

    @abstractmethod
    def run(self, factory: EngineFactory) -> Figures:
        """Return the row's result."""
