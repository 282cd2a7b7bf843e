"""Functions that a model calls on a GPU: every kernel, under its name in `kernels.reference`."""

# ruff: noqa: F401

from kernels.gpu.activation import gated
from kernels.gpu.decode_attention import decode_attention
from kernels.gpu.embedding import embed
from kernels.gpu.experts import multiply_experts, route, sum_experts
from kernels.gpu.fp8 import quantize_fp8
from kernels.gpu.lora import expand, shrink
from kernels.gpu.norm import add_rms_norm, rms_norm
from kernels.gpu.prefill_attention import prefill_attention, prefill_queries
from kernels.gpu.quantized import multiply_quantized
from kernels.gpu.rope import rope_store_kv
from kernels.gpu.sampling import adjust_logits, sample
from kernels.gpu.slabs import copy_slabs
