"""GPTQ (Frantar et al., arXiv 2210.17323): codes of 4 bits that change a layer's outputs least."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from transformers import LlamaForCausalLM

from kernels.quantized import QuantizedWeight, Rounding

_SHARING = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""Projections of a layer; those with the same inputs are rounded as one weight."""
_DAMPING = 0.01
"""Part of the mean of the Hessian's diagonal that is added to it (the paper, section 3.3)."""
_HALF_STEPS = 7.5
"""Steps from zero to the middle of the outermost codes, -8 and 7."""
_CLIPS = torch.linspace(1.0, 0.7, 13)
"""Scales that are tried, as parts of the one that clips nothing."""


@torch.inference_mode()
def rounded_projections(
    model: LlamaForCausalLM, token_ids: torch.Tensor, group_size: int
) -> Iterator[tuple[str, QuantizedWeight]]:
    """Yield each projection's name and weight, and round the model itself layer by layer, so that
    a layer makes up for the errors of those before it.

    token_ids: [rows, tokens], the calibration text.
    """
    inner = model.model
    hidden = inner.embed_tokens(token_ids)
    rotary = inner.rotary_emb(hidden, torch.arange(token_ids.shape[1]).unsqueeze(0))
    for number, layer in enumerate(inner.layers):
        modules = dict(layer.named_modules())
        with _hessians(modules) as hessians:
            layer(hidden, position_embeddings=rotary)
        for names, hessian in zip(_SHARING, hessians, strict=True):
            weights = [modules[name].weight for name in names]
            together = quantize_gptq(torch.cat(weights), hessian, group_size)
            for name, weight, part in zip(names, weights, _split(together, weights), strict=True):
                weight.copy_(part.dequantize())
                yield f"model.layers.{number}.{name}", part
        hidden = layer(hidden, position_embeddings=rotary)


def quantize_gptq(weight: torch.Tensor, hessian: torch.Tensor, group_size: int) -> QuantizedWeight:
    """Round a weight for the inputs that it will have.

    weight: [out, in].   hessian: [in, in], the sum of x x^T over inputs x.
    Inputs are rounded one after the other; what each loses is made up for by those after it
    (the paper, algorithm 1, with the group as the block).
    """
    num_inputs = weight.shape[1]
    left, codes = weight.clone(), torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight), num_inputs // group_size)
    shares = _shares(hessian)
    for group, start in enumerate(range(0, num_inputs, group_size)):
        end = start + group_size
        scale = scales[:, group] = _scale(left[:, start:end])
        errors = torch.empty(len(weight), group_size)
        for i in range(start, end):
            code = (left[:, i] / scale).round_().clamp_(-8, 7)
            error = (left[:, i] - code * scale) / shares[i, i]
            left[:, i:end] -= torch.outer(error, shares[i, i:end])
            codes[:, i], errors[:, i - start] = code, error
        left[:, end:] -= errors @ shares[start:end, end:]
    return QuantizedWeight(Rounding(4, group_size), codes, scales)


def _shares(hessian: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse Hessian: row i says how the inputs after i make up
    for the error of i.
    """
    damped = hessian.double()
    damped.diagonal().add_(_DAMPING * damped.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()


def _scale(group: torch.Tensor) -> torch.Tensor:
    """The scales of a group, [out], with the least squared error of those tried; float16 numbers.

    group: [out, inputs].
    """
    widest = group.abs().amax(1) / _HALF_STEPS
    least = torch.finfo(torch.float16).tiny
    tried = (widest * _CLIPS.unsqueeze(1)).clamp(min=least).half().float().unsqueeze(2)
    codes = (group / tried).round_().clamp_(-8, 7)
    errors = (codes * tried - group).square_().sum(2)
    return tried.squeeze(2).gather(0, errors.argmin(0, keepdim=True)).squeeze(0)


def _split(weight: QuantizedWeight, like: list[torch.Tensor]) -> list[QuantizedWeight]:
    """Cut a weight by outputs into parts as long as those of `like`."""
    sizes = [len(part) for part in like]
    pairs = zip(weight.codes.split(sizes), weight.scales.split(sizes), strict=True)
    return [QuantizedWeight(weight.rounding, codes, scales) for codes, scales in pairs]


@contextmanager
def _hessians(modules: dict[str, torch.nn.Module]) -> Iterator[list[torch.Tensor]]:
    """The Hessians of a layer's inputs, in the order of _SHARING, after it has run."""
    found: list[torch.Tensor] = []

    def note(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        x = inputs[0].flatten(0, -2)
        found.append(x.T @ x)

    with ExitStack() as hooks:
        for names in _SHARING:
            handle = modules[names[0]].register_forward_pre_hook(note)
            hooks.callback(handle.remove)
        yield found
