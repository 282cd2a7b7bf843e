"""A model over two devices, two processes with sums in their graphs, against torch in float32."""

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from kernels.gpu.launch import INTERPRETED
from kernels.quantized import as_numbers
from tests.gpu.setting import Check, Setting
from tests.gpu.whole_model import Script

SIZE = 2
_TIMEOUT_S = 400.0


def rank_checks() -> dict[str, Check]:
    return {"ranks": _check}


def script_of(setting: Setting) -> Script:
    """Inputs of all ranks and of torch: a model whose heads can be shared."""
    sizes = replace(setting.models, kv_heads=max(SIZE, setting.models.kv_heads))
    return Script(replace(setting, models=sizes), "llama")


def logits_path(folder: Path, step: int) -> Path:
    """Path of a step's logits, [rows and drafts, vocab] float32, which the first rank saves."""
    return folder / f"logits-{step}.npy"


def _check(setting: Setting) -> None:
    script = script_of(setting)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = {name: as_numbers(weight) for name, weight in script.weights.items()}
        save_file(weights, folder / "model.safetensors")
        _run_ranks(setting, folder)
        script.compare(
            lambda batch: torch.from_numpy(np.load(logits_path(folder, batch.step))), folder
        )


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
