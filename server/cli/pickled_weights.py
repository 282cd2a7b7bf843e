"""Weights in a pickle, as PEFT wrote them before safetensors, turned into the file that is sent.

torch loads them with `weights_only`, which builds tensors and runs no code of the file.
"""

import re
import zipfile
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors.torch import save_file

from server.cli.adapter_folder import NotSendable

_OF_TORCHTUNE = re.compile(r"layers\.\d+\.attn\..+\.lora_[ab]\.weight")
# Errors by which torch says that a file is damaged, or that it holds more than tensors.
_FAULTS = (AssertionError, AttributeError, EOFError, LookupError, MemoryError, RuntimeError,
           TypeError, UnpicklingError, ValueError, zipfile.BadZipFile)  # fmt: skip


def convert(path: Path, out: Path) -> None:
    """Write the tensors of a pickle as safetensors. Raises NotSendable, OSError."""
    try:
        tensors = _load(path)
        if any(map(_OF_TORCHTUNE.fullmatch, tensors)):
            raise NotSendable(
                f"{path.name} has rows in torchtune's own order; push what its HF checkpointer "
                "saves, with adapter_model.safetensors."
            )
        save_file(tensors, out, metadata={"format": "pt"})
    except _FAULTS as error:
        raise NotSendable(
            f"{path.name} is damaged, or holds more than tensors; save the adapter with PEFT as "
            "safetensors."
        ) from error


def _load(path: Path) -> dict[str, torch.Tensor]:
    """Copies of the tensors by name. Raises one of _FAULTS, or OSError."""
    size_bytes = path.stat().st_size
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.filelist) > size_bytes:
                raise ValueError("compressed, which torch.save does not do")
    tensors = torch.load(path, map_location="cpu", weights_only=True)
    if sum(tensor.nbytes for tensor in tensors.values()) > size_bytes:
        raise ValueError("views of more bytes than there are")
    # save_file refuses tensors that share memory.
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
