"""Adapters of a step, and its dtype, that tests of LoRA kernels go through."""

import pytest
import torch

from tests.kernels.lora_cases import MIXES
from tests.soak import soak

FEW_MIXES = ("one token", "zipf", "with base rows", "base rows only")
MIXES_AND_DTYPES = pytest.mark.parametrize(
    ("mix", "dtype"),
    [
        *((mix, torch.float16) for mix in FEW_MIXES),
        ("zipf", torch.float32),
        *soak(*((mix, torch.float16) for mix in MIXES if mix not in FEW_MIXES)),
        *soak(*((mix, torch.float32) for mix in MIXES if mix != "zipf")),
    ],
)
