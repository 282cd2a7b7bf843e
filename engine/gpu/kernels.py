"""Interface of a step's kernels: `kernels.gpu.ops`, or `kernels.reference` without a GPU."""

# mypy: disable-error-code="misc"
# Members of a protocol are to be annotated, but the functions' own types are what is meant here.

from typing import Protocol

from kernels import reference


class Kernels(Protocol):
    """Kernels of a step, with the signatures of `kernels.reference`, which defines what each of
    them computes.
    """

    embed = staticmethod(reference.embed)
    rms_norm = staticmethod(reference.rms_norm)
    add_rms_norm = staticmethod(reference.add_rms_norm)
    rope_store_kv = staticmethod(reference.rope_store_kv)
    decode_attention = staticmethod(reference.decode_attention)
    prefill_attention = staticmethod(reference.prefill_attention)
    prefill_queries = staticmethod(reference.prefill_queries)
    gated = staticmethod(reference.gated)
    shrink = staticmethod(reference.shrink)
    expand = staticmethod(reference.expand)
    quantize_fp8 = staticmethod(reference.quantize_fp8)
    multiply_quantized = staticmethod(reference.multiply_quantized)
    route = staticmethod(reference.route)
    multiply_experts = staticmethod(reference.multiply_experts)
    sum_experts = staticmethod(reference.sum_experts)
    copy_slabs = staticmethod(reference.copy_slabs)
    adjust_logits = staticmethod(reference.adjust_logits)
    sample = staticmethod(reference.sample)
