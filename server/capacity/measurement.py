"""Measures this machine in a child process, since nothing here may import torch."""

import json
import os
import subprocess
import sys
from typing import Any

from server.capacity.hardware import Hardware
from server.capacity.sizes import ModelSizes
from server.capacity.steps import Speed, measured_speed

_TIMEOUT_S = 300.0


class MeasurementFailed(Exception):
    """The child did not print rates; str() has the last line that it wrote."""


def measure(
    sizes: ModelSizes, threads: int, usd_per_hour: float
) -> tuple[Hardware, dict[str, Speed]]:
    """Measure this machine: its row of the table, and its rates for a model by quantization.

    threads: of the engine.   Raises MeasurementFailed.
    """
    job = {"config": _llama_config(sizes), "quantizations": [None, "int8", "int4"]}
    told = _run(job | {"threads": threads})
    bytes_per_s, rates = told["bytes_per_s"], told["rates"]
    fastest = max(rate for _, rate in rates["float"]["products"]["flops_per_s"])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    hardware = Hardware(
        "this machine", "cpu", memory, bytes_per_s, fastest, bytes_per_s, usd_per_hour
    )
    # The kernels of 4 bits are the same for any groups.
    speeds = {name: measured_speed(rate) for name, rate in rates.items()}
    return hardware, speeds | {"awq": speeds["int4"]}


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
