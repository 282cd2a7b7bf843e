"""The decoder of `engine.cpu.decoder` on a device: fused projections, kernels, no host syncs.

What adapters add is shrunk in parallel with the base model's products, and expanded inside the
kernels that come after them: by rope_store_kv for q, k and v, by `gated` for gate and up.

Over several ranks a layer has two sums, of the outputs of o and of down with their adapters' parts.
No two sums run at the same time, and every rank runs the same sums in the same order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from engine.gpu.experts import ExpertMlp
from engine.gpu.inputs import StepInputs
from engine.gpu.kernels import Kernels
from engine.gpu.linear import Linear, Linears, Quantization
from engine.models.checkpoint import Checkpoint, LayerWeights
from engine.models.config import DecoderConfig
from engine.models.layer_norms import LayerNorms
from engine.models.ranks import Ranks
from engine.models.rounding import NO_ROUNDING, WeightRounding
from kernels.elementwise import soft_cap_
from kernels.quantized import Weight
from kernels.reference import FP8
from kernels.work import Delta, HeadNorms
from lora.device import Device
from lora.shard import WHOLE
from lora.sites import site_of

_QKV, _O, _GATE_UP, _DOWN = (0, 1, 2), (3,), (4, 5), (6,)


LoraOverlap = Literal["shrink", "none"]


def _at_once(work: Callable[[], None]) -> Callable[[], None]:
    """Run `work` at once, in place of Device.beside, which runs it in parallel."""
    work()
    return lambda: None


@dataclass(frozen=True, slots=True)
class _DenseMlp:
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class _Layer:
    """Parts of a layer, in the order in which a token passes them.

    joint_norms: norms of q and of k that go over all heads together.   head_norms: norms of each
    head.   A family has one of them, or neither.
    """

    norms: LayerNorms[torch.Tensor]
    qkv: Linear
    joint_norms: tuple[torch.Tensor, torch.Tensor] | None
    head_norms: HeadNorms | None
    o: Linear
    mlp: _DenseMlp | ExpertMlp
    window: int | None
    kv_scales: tuple[float, float]
    rope: int


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Memory that a step writes and the next one reads. Graphs know its addresses, so there is one.

    tokens: [rows] int32, the chosen ones; negative if a row failed.   finite: [T] int32, 0 for
    tokens with values that are not finite, on any rank.   logits: [rows, vocab] float32; no rows
    on ranks other than the first.
    """

    tokens: torch.Tensor
    finite: torch.Tensor
    logits: torch.Tensor


class GpuDecoder:
    """The model on a device.

    weights: tensors by their Hugging Face names, in host memory, in the dtype to compute in, or
    quantised. The embedding and the norms are never quantised.
    ranks: the ranks that share the model, if there are several. Then `weights` are this rank's
    parts (see ShardedWeights); `config` is the whole model's. Every rank has the whole embedding
    and norms. Only the first has the head, so it alone has logits and chooses tokens.
    lora_overlap: see EngineConfig.   rounding: see Checkpoint.
    Raises UnsupportedModel as Checkpoint does.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Weight],
        max_model_len: int,
        device: Device,
        kernels: Kernels,
        quantization: Quantization | None = None,
        ranks: Ranks | None = None,
        lora_overlap: LoraOverlap = "shrink",
        rounding: WeightRounding = NO_ROUNDING,
    ) -> None:
        self.config = config
        self.device = device
        self.kernels = kernels
        self.ranks = ranks
        self.shard = ranks.shard if ranks else WHOLE
        self._run_shrink = device.beside if lora_overlap == "shrink" else _at_once
        own = config.shard(self.shard.size)
        self._shape, self._experts = own.shape, own.experts
        there = device.torch_device
        checkpoint = Checkpoint(own, weights, rounding)
        self.embedding = checkpoint.embedding.to(there)
        self._linears = Linears(there, self.embedding.dtype, kernels, quantization)
        self.lm_head: Linear | None = None
        if self.is_first:
            is_shared = checkpoint.lm_head is checkpoint.embedding
            head = self.embedding if is_shared else checkpoint.lm_head.to(there)
            self.lm_head = self._linears.make(head)
        self._embedding_scale = config.embedding_scale(self.embedding.dtype)
        self.layers = [self._place(i, layer) for i, layer in enumerate(checkpoint.layers())]
        self.norm = checkpoint.norm.to(there)
        tables = [rope.tables(max_model_len) for rope in config.ropes.different]
        self._turns = [(cos.to(there), sin.to(there)) for cos, sin in tables]
        self.weight_bytes = checkpoint.num_bytes

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank, which alone has logits."""
        return self.shard.index == 0

    def _place(self, index: int, layer: LayerWeights) -> _Layer:
        there = self.device.torch_device
        qk_norms, eps = None, self.config.rms_norm_eps
        if layer.qk_norms is not None:
            qk_norms = layer.qk_norms[0].to(there), layer.qk_norms[1].to(there)
        is_joint = self.config.qk_norms == "projections"
        return _Layer(
            norms=layer.norms.map(lambda norm: norm.to(there)),
            qkv=self._fuse(layer, _QKV),
            joint_norms=qk_norms if is_joint else None,
            head_norms=HeadNorms(*qk_norms, eps) if qk_norms and not is_joint else None,
            o=self._fuse(layer, _O),
            mlp=self._place_mlp(index, layer),
            window=layer.window,
            kv_scales=layer.kv_scales,
            rope=self.config.ropes.numbers[index],
        )

    def _place_mlp(self, index: int, layer: LayerWeights) -> _DenseMlp | ExpertMlp:
        experts = self._experts[index]
        if experts is None or layer.experts is None:
            return _DenseMlp(self._fuse(layer, _GATE_UP), self._fuse(layer, _DOWN))
        return ExpertMlp(experts, layer.experts, self._linears, self.config.activation)

    def _fuse(self, layer: LayerWeights, projections: tuple[int, ...]) -> Linear:
        return self._linears.fuse(
            [layer.projections[p] for p in projections], [layer.biases[p] for p in projections]
        )

    def run(self, inputs: StepInputs, kv: torch.Tensor, out: StepOutputs) -> torch.Tensor:
        """Write the KV of all tokens, `out.finite`, and the first rows of `out.logits`.

        Result: the inputs of the head, [T, hidden].
        kv: [slabs, layers, 2, kv heads, block_size, head_dim], this rank's heads.
        """
        kernels, eps = self.kernels, self.config.stream_eps
        finite = out.finite[: len(inputs.input_ids)].fill_(1)
        residual = kernels.embed(self.embedding, inputs.input_ids, inputs.sources, out.tokens)
        if self._embedding_scale != 1.0:
            residual *= self._embedding_scale
        first_norm = self.layers[0].norms.before_attention
        x = residual if first_norm is None else kernels.rms_norm(residual, first_norm, eps)
        next_norms = [*(layer.norms.before_attention for layer in self.layers[1:]), self.norm]
        for index, layer in enumerate(self.layers):
            x = self._attention(index, layer, x, inputs, kv[:, index], finite)
            x = self._add(residual, x, layer.norms.after_attention, layer.norms.before_mlp)
            x = self._run_mlp(index, layer.mlp, x, inputs)
            # A NaN never leaves the residual stream, so checking the last one covers all layers.
            checked = finite if layer is self.layers[-1] else None
            x = self._add(residual, x, layer.norms.after_mlp, next_norms[index], checked)
        if self.ranks is not None:
            # Flags are combined, since only a rank itself sees the keys and values of its heads.
            self.ranks.all_reduce(finite)
            finite.floor_divide_(self.shard.size)
        if self.lm_head is not None:
            logits = out.logits[: len(inputs.logits_indices)]
            logits.copy_(self.lm_head(x[inputs.logits_indices]))
            if self.config.soft_caps.logits is not None:
                soft_cap_(logits, self.config.soft_caps.logits)
        return x

    def _attention(
        self,
        index: int,
        layer: _Layer,
        x: torch.Tensor,
        inputs: StepInputs,
        kv: torch.Tensor,
        finite: torch.Tensor,
    ) -> torch.Tensor:
        kernels, shape = self.kernels, self._shape
        shrunk = self._shrink(x, inputs, index, _QKV)
        qkv = layer.qkv(x)
        delta = shrunk()
        if layer.joint_norms is not None:
            if delta is not None:
                kernels.expand(qkv, delta)
            self._norm_jointly(qkv, layer.joint_norms)
            delta = None
        positions = *self._turns[layer.rope], inputs.positions
        k_scale, v_scale = layer.kv_scales if kv.dtype == FP8 else (1.0, 1.0)
        kernels.rope_store_kv(
            qkv, kv, *positions, inputs.slots, finite, layer.head_norms, delta, (k_scale, v_scale)
        )
        q = qkv.view(len(x), -1, shape.head_dim)[:, : shape.num_heads]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        scale = self.config.multipliers.attention
        if k_scale != 1.0:
            scale = (scale or shape.head_dim**-0.5) * k_scale
        sight = layer.window, scale, self.config.soft_caps.attention
        kernels.decode_attention(out, q, kv, inputs.attention, *sight)
        kernels.prefill_attention(out, q, kv, inputs.attention, *sight)
        if v_scale != 1.0:
            out *= v_scale
        return self._project(layer.o, out.flatten(1), inputs, index, _O)

    def _norm_jointly(self, qkv: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Norm q over all its heads, and k, in place.   norms: their weights."""
        start = 0
        for weight in norms:
            part = qkv[:, start : start + len(weight)]
            part.copy_(self.kernels.rms_norm(part, weight, self.config.rms_norm_eps))
            start += len(weight)

    def _add(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor,
        after: torch.Tensor | None,
        before_next: torch.Tensor | None,
        finite: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add to the residual stream, in place; return what the next part reads from it.

        after: norm of what is added.   before_next: norm of what the next part reads.
        finite: flags of the stream, if it is the last one, which always has a norm.
        """
        kernels, config = self.kernels, self.config
        if after is not None:
            delta = kernels.rms_norm(delta, after, config.rms_norm_eps)
        if before_next is None:
            return residual.add_(delta)
        return kernels.add_rms_norm(residual, delta, before_next, config.stream_eps, finite)

    def _run_mlp(
        self, index: int, mlp: _DenseMlp | ExpertMlp, x: torch.Tensor, inputs: StepInputs
    ) -> torch.Tensor:
        if isinstance(mlp, _DenseMlp):
            delta = self._shrink(x, inputs, index, _GATE_UP)
            activated = self.kernels.gated(mlp.gate_up(x), self.config.activation, delta())
            return self._project(mlp.down, activated, inputs, index, _DOWN)
        y = mlp(x)
        if self.ranks is not None:
            # All ranks choose the same experts, since they have the same x and the whole router.
            self.ranks.all_reduce(y)
        return y

    def _project(
        self,
        linear: Linear,
        x: torch.Tensor,
        inputs: StepInputs,
        layer: int,
        projections: tuple[int, ...],
    ) -> torch.Tensor:
        """Compute a projection that is cut by its inputs, with what adapters add to it.

        Each rank adds what its own inputs give, so that the sum over the ranks is complete.
        """
        shrunk = self._shrink(x, inputs, layer, projections)
        y = linear(x)
        if (delta := shrunk()) is not None:
            self.kernels.expand(y, delta)
        if self.ranks is not None:
            self.ranks.all_reduce(y)
        return y

    def _shrink(
        self, x: torch.Tensor, inputs: StepInputs, layer: int, projections: tuple[int, ...]
    ) -> Callable[[], Delta | None]:
        """Begin to shrink x in parallel with what follows; the returned function waits for it."""
        if (work := inputs.lora) is None or projections[0] not in self._shape.adapted:
            return lambda: None
        site = site_of(self._shape, layer, projections)
        done: list[Delta] = []
        join = self._run_shrink(lambda: done.append(self.kernels.shrink(x, work, site)))

        def take() -> Delta:
            join()
            return done.pop()

        return take
