"""Chooses the kernels of this CPU: in C if they compute right here, else in plain torch."""

import logging
from collections.abc import Callable

from engine.config import EngineConfig
from engine.cpu.self_check import check_kernels
from engine.errors import UnsupportedModel
from engine.models.config import DecoderConfig
from kernels.cpu.errors import Unavailable
from kernels.cpu.native import NativeKernels
from kernels.cpu.plain import AttentionShape, CpuKernels
from kernels.quantized import Rounding

logger = logging.getLogger(__name__)

_TOLERANCE, _ROUNDED_TOLERANCE = 1e-3, 0.1
"""Relative error allowed in logits after one layer, and with quantised weights, where rows are
rounded as well: right kernels are 1e-6 and 0.02 from torch's, wrong ones 1.
"""

Maker = Callable[[AttentionShape, int], CpuKernels]
"""(shape, threads) -> compiled kernels. Raises Unavailable."""


def choose_kernels(
    config: EngineConfig,
    model_config: DecoderConfig,
    shape: AttentionShape,
    make_compiled: Maker = NativeKernels,
    rounding: Rounding | None = None,
) -> CpuKernels:
    """Choose the kernels. Raises UnsupportedModel if none that the config allows work here.

    rounding: of the projections' weights.
    """
    if config.dtype != "float32":
        _refuse_what_wants_float32(config)
        return CpuKernels(shape)
    if config.cpu_kernels == "torch":
        if config.batch_invariant:
            raise UnsupportedModel(_no_compiled_kernels(config, "cpu_kernels is torch"))
        logger.info("CPU kernels: torch")
        return CpuKernels(shape)
    try:
        kernels = make_compiled(shape, config.threads)
        check_kernels(
            kernels,
            CpuKernels(shape),
            model_config,
            shape,
            tolerance=_TOLERANCE if rounding is None else _ROUNDED_TOLERANCE,
            is_invariant=config.batch_invariant,
            rounding=rounding,
        )
    except Unavailable as reason:
        if config.batch_invariant or config.cpu_kernels == "native":
            raise UnsupportedModel(_no_compiled_kernels(config, str(reason))) from None
        logger.warning(
            "CPU kernels: torch, at half the speed of those in C or less, because %s. Install gcc, "
            "or Chorale from a wheel that was built for this processor",
            reason,
        )
        return CpuKernels(shape)
    logger.info("CPU kernels: %s", kernels.name)
    return kernels


def _no_compiled_kernels(config: EngineConfig, reason: str) -> str:
    wish = ", which batch_invariant needs" if config.batch_invariant else ""
    return f"no kernels in C for this CPU{wish}: {reason}"


def _refuse_what_wants_float32(config: EngineConfig) -> None:
    """Raise UnsupportedModel for settings of a CPU that need float32."""
    wishes = {
        "batch_invariant": config.batch_invariant,
        f"quantization {config.quantization}": config.quantization is not None,
        f"cpu_kernels {config.cpu_kernels}": config.cpu_kernels == "native",
    }
    for name, is_wanted in wishes.items():
        if is_wanted:
            raise UnsupportedModel(
                f"{name} on a CPU wants dtype float32: in {config.dtype} there is plain torch "
                "only, whose sums differ with the number of rows"
            )
