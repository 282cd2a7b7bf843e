"""Layouts of an adapter's folder: what else lies in it, and in which files its weights are.

A layout is a function of the path of PEFT's two files that changes the folder in place.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from registry.formats.peft_config import CONFIG_FILE
from registry.formats.peft_format import WEIGHTS_FILE

Layout = Callable[[Path], None]


def beside(*names: str) -> Layout:
    """Files beside the adapter's, some of them in folders."""

    def lay_out(folder: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("beside")

    return lay_out


def within(subfolder: str, *names: str) -> Layout:
    """The adapter in a subfolder; names: of files beside that subfolder."""

    def lay_out(folder: Path) -> None:
        files = list(folder.iterdir())
        (folder / subfolder).mkdir(parents=True)
        for file in files:
            file.rename(folder / subfolder / file.name)
        beside(*names)(folder)

    return lay_out


def checkpointed(folder: Path) -> None:
    """The adapter, and the trainer's checkpoints of it with their states."""
    for checkpoint in ("checkpoint-1", "checkpoint-2"):
        (folder / checkpoint).mkdir()
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            shutil.copyfile(folder / name, folder / checkpoint / name)
        beside("optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json")(
            folder / checkpoint
        )
    beside("README.md", "training_args.bin")(folder)


def pickled(folder: Path) -> None:
    """The weights as torch.save writes them."""
    torch.save(load_file(folder / WEIGHTS_FILE), folder / "adapter_model.bin")
    (folder / WEIGHTS_FILE).unlink()


def sharded(folder: Path) -> None:
    """The weights in two files with an index, as transformers shards a model's."""
    tensors = load_file(folder / WEIGHTS_FILE)
    (folder / WEIGHTS_FILE).unlink()
    names = sorted(tensors)
    places = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"adapter_model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size_bytes}, "weight_map": places}
    (folder / f"{WEIGHTS_FILE}.index.json").write_text(json.dumps(index))


def of_mlx(folder: Path) -> None:
    """mlx-lm's files: lora_a is [in, r], lora_b [r, out], and scale * (x @ lora_a) @ lora_b is
    added to a layer's output (mlx_lm.tuner.lora).
    """
    config = json.loads((folder / CONFIG_FILE).read_text())
    tensors = {}
    for name, tensor in load_file(folder / WEIGHTS_FILE).items():
        module, _, side = name.removeprefix("base_model.model.").rpartition(".lora_")
        tensors[f"{module}.lora_{side[0].lower()}"] = tensor.T.contiguous()
    (folder / WEIGHTS_FILE).unlink()
    for file in ("adapters.safetensors", "0000100_adapters.safetensors"):
        save_file(tensors, folder / file, {"format": "mlx"})
    scale = config["lora_alpha"] / config["r"]
    mlx = {
        "adapter_path": "adapters", "batch_size": 4, "data": "data", "fine_tune_type": "lora",
        "grad_checkpoint": False, "iters": 100, "learning_rate": 1e-5, "lr_schedule": None,
        "lora_parameters": {"rank": config["r"], "dropout": 0.0, "scale": scale},
        "model": "mlx-community/Llama-3.2-1B-Instruct-4bit", "num_layers": 16, "optimizer": "adam",
        "seed": 0, "train": True,
    }  # fmt: skip
    (folder / CONFIG_FILE).write_text(json.dumps(mlx))
