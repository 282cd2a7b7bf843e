"""The table of hardware: memory, bandwidth, FLOPs, and the price of an hour."""

from dataclasses import dataclass

GB, TB = 10**9, 10**12
_GIB = 2**30

BYTES_SHARE, FLOPS_SHARE = 0.8, 0.5
"""Shares of a device's bandwidth and FLOPs on paper that a step is planned to reach. They are the
goals of bench/GPU.md, not measurements: no kernel of this project has run on a GPU yet.
"""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device: one GPU, or a machine's processors.

    flops_per_s: dense products, of 16 bits on a GPU and of float32 on a CPU; weights of 8 and 4
    bits become such numbers first.   link_bytes_per_s: to the other devices of a machine, one way.
    step_s: time of a step besides its bytes and FLOPs: launches, the scheduler.
    usd_per_hour: on demand.
    """

    name: str
    kind: str
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float
    usd_per_hour: float
    step_s: float = 0.001

    @property
    def itemsize(self) -> int:
        """Bytes of a number of weights, KV and adapters, if nothing is rounded."""
        return 2 if self.kind == "gpu" else 4


def _gpu(
    name: str, memory_gb: float, gb_per_s: float, tflops: float, link_gb_per_s: float, usd: float
) -> Hardware:
    return Hardware(
        name, "gpu", int(memory_gb * GB), gb_per_s * GB, tflops * TB, link_gb_per_s * GB, usd
    )


# Memory, bandwidth and dense FLOPs (no sparsity) are those of the makers' data sheets; links are
# NVLink's or Infinity Fabric's in one direction, or PCIe's.
# Dollars: A100 80GB, H100, H200, B200, L4, L40S and RTX 4090 are active workers by the second,
# docs.runpod.io/serverless/pricing, read in 2026; A10G is g5.xlarge of AWS in us-east-1, 2026.
# Not checked are A100 40GB and MI300X (what Lambda and RunPod asked in 2025), and the CPUs
# (c7a.48xlarge and c7i.48xlarge of AWS). Prices move: --usd-per-hour replaces them.
_TABLE = (
    _gpu("a100-40gb", 40, 1555, 312, 300, 1.29),
    _gpu("a100-80gb", 80, 2039, 312, 300, 2.16),
    _gpu("h100-80gb", 80, 3350, 989, 450, 3.35),
    _gpu("h200-141gb", 141, 4800, 989, 450, 4.46),
    _gpu("b200-192gb", 192, 8000, 2250, 900, 6.84),
    _gpu("l4-24gb", 24, 300, 121, 32, 0.47),
    _gpu("l40s-48gb", 48, 864, 362, 32, 1.33),
    _gpu("a10g-24gb", 24, 600, 70, 32, 1.01),
    _gpu("rtx4090-24gb", 24, 1008, 165, 32, 0.76),
    _gpu("mi300x-192gb", 192, 5300, 1307, 448, 2.49),
    # 2 x 96 cores at 3.7 GHz, 32 FLOPs each cycle; 2 x 12 channels of DDR5-4800
    Hardware("epyc-9r14", "cpu", 384 * _GIB, 921 * GB, 22.7 * TB, 64 * GB, 9.85),
    # 2 x 48 cores at 2.4 GHz, 64 FLOPs each cycle; 2 x 8 channels of DDR5-4800
    Hardware("xeon-8488c", "cpu", 384 * _GIB, 614 * GB, 14.7 * TB, 48 * GB, 8.57),
)

HARDWARE = {hardware.name: hardware for hardware in _TABLE}
"""Hardware by name."""
