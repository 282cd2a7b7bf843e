"""Chooses the kernels of this CPU: in C, by numba or by torch, the first that compute right."""

import logging
from collections.abc import Callable, Mapping, Sequence

from engine.config import EngineConfig
from engine.cpu.self_check import check_kernels
from engine.errors import UnsupportedModel
from engine.models.config import DecoderConfig
from kernels.cpu.errors import Unavailable
from kernels.cpu.interface import AttentionShape, CpuKernels
from kernels.cpu.linear import LinearMaker
from kernels.cpu.plain import PlainKernels
from kernels.quantized import Rounding

logger = logging.getLogger(__name__)

_TOLERANCE, _ROUNDED_TOLERANCE = 1e-3, 0.1
"""Relative error allowed in logits after one layer, and with quantised weights, where rows are
rounded as well: right kernels are 1e-6 and 0.02 from torch's, wrong ones 1.
"""

Maker = Callable[[EngineConfig, AttentionShape, LinearMaker], CpuKernels]
"""Makes one kind of kernels. Raises Unavailable."""


def _native(config: EngineConfig, shape: AttentionShape, linears: LinearMaker) -> CpuKernels:
    from kernels.cpu.native import NativeKernels

    return NativeKernels(shape, config.threads)


def _numba(config: EngineConfig, shape: AttentionShape, linears: LinearMaker) -> CpuKernels:
    try:
        from kernels.cpu.numba_kernels import NumbaKernels
    except ModuleNotFoundError as missing:
        raise Unavailable(f"{missing.name} is not installed") from None
    return NumbaKernels(shape, linears, config.threads)


def _torch(config: EngineConfig, shape: AttentionShape, linears: LinearMaker) -> CpuKernels:
    return PlainKernels(shape, linears, is_invariant=config.batch_invariant)


MAKERS: dict[str, Maker] = {"native": _native, "numba": _numba, "torch": _torch}
"""Makers by the values of `EngineConfig.cpu_kernels`, the fastest first."""


def choose_kernels(
    config: EngineConfig,
    model_config: DecoderConfig,
    shape: AttentionShape,
    makers: Mapping[str, Maker] = MAKERS,
    rounding: Rounding | None = None,
) -> CpuKernels:
    """Choose the kernels. Raises UnsupportedModel if none that the config allows work here.

    rounding: of the projections' weights.
    """
    if config.dtype != "float32":
        _refuse_what_wants_float32(config)
        return PlainKernels(shape)
    linears = LinearMaker(is_invariant=config.batch_invariant)
    reasons = []
    for kind, make in makers.items():
        if config.cpu_kernels not in ("auto", kind):
            continue
        try:
            kernels = make(config, shape, linears)
            check_kernels(
                kernels,
                PlainKernels(shape),
                model_config,
                shape,
                tolerance=_TOLERANCE if rounding is None else _ROUNDED_TOLERANCE,
                is_invariant=config.batch_invariant,
                rounding=rounding,
            )
        except Unavailable as reason:
            reasons.append(f"{kind}: {reason}")
        else:
            logger.info("%s", _describe(kernels.name, linears, reasons))
            return kernels
    wish = " with batch_invariant" if config.batch_invariant else ""
    raise UnsupportedModel(f"no kernels{wish} for this CPU: {'; '.join(reasons)}")


def _describe(name: str, linears: LinearMaker, reasons: Sequence[str]) -> str:
    products = f", products by {' and '.join(sorted(linears.names))}" if linears.names else ""
    why_not = f" ({'; '.join(reasons)})" if reasons else ""
    return f"CPU kernels: {name}{products}{why_not}"


def _refuse_what_wants_float32(config: EngineConfig) -> None:
    """Raise UnsupportedModel for settings of a CPU that need float32."""
    wishes = {
        "batch_invariant": config.batch_invariant,
        f"quantization {config.quantization}": config.quantization is not None,
        f"cpu_kernels {config.cpu_kernels}": config.cpu_kernels in ("native", "numba"),
    }
    for name, is_wanted in wishes.items():
        if is_wanted:
            raise UnsupportedModel(
                f"{name} on a CPU wants dtype float32: in {config.dtype} there is plain torch "
                "only, whose sums differ with the number of rows"
            )
