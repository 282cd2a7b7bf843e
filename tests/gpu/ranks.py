"""A model over two devices, two processes with sums in their graphs, against torch in float32."""

import hashlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from engine.batch import Batch, ScheduledRow
from engine.models.config import DecoderConfig
from kernels.gpu.launch import INTERPRETED
from lora.host import PackedAdapter
from tests.gpu.models import make_adapters, make_config, make_form, make_weights, pack_adapter
from tests.gpu.setting import Check, ModelSizes, Setting
from tests.gpu.stage import GREEDY
from tests.gpu.whole_model import Losses, TorchModel

SIZE = 2
_ADAPTER_SLABS = 150
"""Slabs for each adapter, more than any of them takes, however it is packed."""
_TIMEOUT_S = 400.0


def rank_checks() -> dict[str, Check]:
    return {"ranks": _check}


@dataclass(frozen=True)
class Script:
    """Inputs of all ranks and of torch; they depend on the setting and its seed only.

    slabs: for each adapter, more than it needs.   blocks: for each row, the base model's first.
    """

    sizes: ModelSizes
    config: DecoderConfig
    weights: dict[str, torch.Tensor]
    adapters: list[bytes]
    num_slabs: int
    slabs: list[list[int]]
    blocks: list[list[int]]
    seed: int

    @classmethod
    def of(cls, setting: Setting) -> "Script":
        sizes = replace(setting.models, kv_heads=max(SIZE, setting.models.kv_heads))
        rng = setting.rng("ranks")
        config = make_config("llama", sizes)
        weights = make_weights(config, setting.dtype, rng)
        adapters = make_adapters(sizes, config, setting.dtype, rng)[:2]
        per_row = make_form(config, setting.dtype).layout.num_blocks(sizes.max_model_len)
        num_rows = len(adapters) + 1
        num_slabs = num_rows * per_row + len(adapters) * _ADAPTER_SLABS
        free = iter(random.Random(setting.seed).sample(range(num_slabs), num_slabs))
        slabs = [[next(free) for _ in range(_ADAPTER_SLABS)] for _ in adapters]
        blocks = [[next(free) for _ in range(per_row)] for _ in range(num_rows)]
        return cls(sizes, config, weights, adapters, num_slabs, slabs, blocks, setting.seed)

    @property
    def limits(self) -> dict[str, int]:
        num_rows = len(self.blocks)
        return {
            "max_model_len": self.sizes.max_model_len,
            "max_num_seqs": num_rows,
            "max_num_batched_tokens": num_rows * self.sizes.max_model_len,
        }

    def slabs_of(self, number: int, packed: PackedAdapter) -> list[int]:
        return self.slabs[number][: packed.num_slabs]

    def batches(self) -> Iterator[Batch]:
        """Steps of chunks of prompts, of decodes, and of both, with a row on the base model and one
        on each adapter.

        An adapter's key is its number, and its generation is 1.
        """
        chance, longest = random.Random(self.seed + 1), self.sizes.max_model_len
        tokens = [[chance.randrange(self.sizes.vocab) for _ in range(longest)] for _ in self.blocks]
        digests = [None, *(hashlib.sha256(data).hexdigest() for data in self.adapters)]
        ends = [0] * len(self.blocks)
        for step in range(1, self.sizes.steps + 1):
            rows = []
            for number, (digest, blocks) in enumerate(zip(digests, self.blocks, strict=True)):
                most = (longest - ends[number]) // (2 if step == 1 else 8)
                count = 1 if step % 2 == 0 or number == step % 3 else max(1, most)
                start, ends[number] = ends[number], ends[number] + count
                own = tuple(tokens[number][start : ends[number]])
                key = str(number - 1) if digest else None
                rows.append(
                    ScheduledRow(
                        f"r{number}",
                        own,
                        start,
                        tuple(blocks),
                        key,
                        digest,
                        int(digest is not None),
                        GREEDY,
                        seed=start,
                        num_output_tokens=start,
                    )  # fmt: skip
                )
            yield Batch(step, tuple(rows))


def logits_path(folder: Path, step: int) -> Path:
    """Path of a step's logits, [rows, vocab] float32, which the first rank saves."""
    return folder / f"logits-{step}.npy"


def _check(setting: Setting) -> None:
    script = Script.of(setting)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_file(script.weights, folder / "model.safetensors")
        _run_ranks(setting, folder)
        exact, same_dtype = (
            _torch_model(script, dtype, folder) for dtype in (torch.float32, setting.dtype)
        )
        losses = Losses()
        for batch in script.batches():
            ours = torch.from_numpy(np.load(logits_path(folder, batch.step)))
            losses.note(batch, ours, same_dtype.run(batch), exact.run(batch))
    losses.check()


def _torch_model(script: Script, dtype: torch.dtype, folder: Path) -> TorchModel:
    longest = script.sizes.max_model_len
    model = TorchModel(script.config, script.weights, dtype, script.num_slabs, longest)
    for number, data in enumerate(script.adapters):
        packed = pack_adapter(data, model.form, folder)
        model.place(str(number), packed, script.slabs_of(number, packed))
    return model


def _run_ranks(setting: Setting, folder: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu.rank", str(folder), str(setting.seed)]
    command += ["--dry"] if INTERPRETED else []
    outputs = [folder / f"rank-{index}.txt" for index in range(SIZE)]
    processes = []
    try:
        for index, output in enumerate(outputs):
            with output.open("wb") as file:
                processes.append(
                    subprocess.Popen([*command, f"--index={index}"], stdout=file, stderr=file)
                )
        statuses = [process.wait(_TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    said = "\n".join(output.read_text() for output in outputs)
    assert not any(statuses), f"ranks ended with {statuses}:\n{said}"
