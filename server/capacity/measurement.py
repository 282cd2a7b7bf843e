"""Measures this machine in a child process, since nothing here may import torch."""

import json
import os
import subprocess
import sys
from typing import Any

from server.capacity.hardware import Hardware
from server.capacity.sizes import ModelSizes, Quantization
from server.capacity.steps import Speed, measured_speed

_TIMEOUT_S = 300.0


class MeasurementFailed(Exception):
    """The child did not print rates; str() has the last line that it wrote."""


class MeasuredMachine:
    """Rates of this machine's processors for one model.   hardware: this machine, as in the table.

    threads: of the engine.   Raises MeasurementFailed.
    """

    def __init__(
        self,
        sizes: ModelSizes,
        quantizations: tuple[Quantization, ...],
        threads: int,
        usd_per_hour: float,
    ) -> None:
        names = [None if name == "float" else name for name in quantizations]
        job = {"config": _llama_config(sizes), "quantizations": names, "threads": threads}
        told = _run(job)
        self.rates: dict[str, Any] = told["rates"]
        fastest = max(rate for _, rate in self.rates["float"]["products"]["flops_per_s"])
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.hardware = Hardware(
            "this machine", "cpu", memory, told["bytes_per_s"], fastest, told["bytes_per_s"],
            usd_per_hour,
        )  # fmt: skip

    def speed(self, quantization: Quantization) -> Speed:
        # The kernels of 4 bits are the same for any groups.
        return measured_speed(self.rates["int4" if quantization == "awq" else quantization])


def _run(job: dict[str, Any]) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "engine.cpu.rates"],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
        told: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise MeasurementFailed(f"it was not done in {_TIMEOUT_S:.0f} s") from None
    except ValueError:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise MeasurementFailed(lines[-1]) from None
    return told


def _llama_config(sizes: ModelSizes) -> dict[str, Any]:
    """A config.json of the same widths; families differ in what takes little time."""
    s = sizes.shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": s.num_layers,
        "hidden_size": s.hidden_size,
        "intermediate_size": s.intermediate_size,
        "num_attention_heads": s.num_heads,
        "num_key_value_heads": s.num_kv_heads,
        "head_dim": s.head_dim,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.max_model_len,
    }
