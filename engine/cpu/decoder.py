"""The decoder of every model family, with LoRA beside every projection."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.cpu.inputs import ForwardInputs
from engine.models.checkpoint import Checkpoint, LayerWeights
from engine.models.config import DecoderConfig
from engine.ranks import Ranks
from kernels.cpu.interface import AttentionShape, CpuKernels, Linear
from kernels.cpu.work import AdapterRuns
from kernels.elementwise import is_finite
from kernels.work import HeadNorms, Site
from lora.layout import CUT_BY_INPUTS, ModelShape
from lora.shard import WHOLE
from lora.sites import site_of

_QKV, _O, _GATE_UP, _DOWN = (0, 1, 2), (3,), (4, 5), (6,)


@dataclass(frozen=True, slots=True)
class _Product:
    """Projections side by side, and the site at which adapters add to them."""

    linear: Linear
    site: Site


@dataclass(frozen=True, slots=True)
class _Layer:
    """Parts of a layer, in the order in which a token passes them."""

    input_norm: torch.Tensor
    qkv: _Product
    head_norms: HeadNorms | None
    o: _Product
    post_norm: torch.Tensor
    gate_up: _Product
    down: _Product
    window: int | None


class Decoder:
    """The model on a CPU.

    weights: tensors by their Hugging Face names, in the dtype to compute in.
    ranks: the ranks that share the model, if there are several. Then `weights` are this rank's
    parts (see ShardedWeights), and `kernels` are for its heads; `config` is the whole model's.
    Raises UnsupportedModel as Checkpoint does.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, torch.Tensor],
        kernels: CpuKernels,
        ranks: Ranks | None = None,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.ranks = ranks
        shard = ranks.shard if ranks else WHOLE
        own = config.shard(shard.size)
        self._shape = own.shape
        checkpoint = Checkpoint(own, weights)
        # Only the first rank has logits and chooses tokens.
        is_first = shard.index == 0
        self.lm_head = kernels.linear(checkpoint.lm_head, None) if is_first else None
        tied_head = self.lm_head if config.tie_word_embeddings else None
        self.embed = kernels.embedding(checkpoint.embedding, tied_head)
        self._embedding_scale = config.embedding_scale(checkpoint.embedding.dtype)
        self.norm = checkpoint.norm
        self.layers = [self._place(i, layer) for i, layer in enumerate(checkpoint.layers())]
        self.weight_bytes = checkpoint.num_bytes

    def _place(self, index: int, layer: LayerWeights) -> _Layer:
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = HeadNorms(layer.q_norm, layer.k_norm, self.config.rms_norm_eps)
        return _Layer(
            input_norm=layer.input_norm,
            qkv=self._fuse(index, layer, _QKV),
            head_norms=norms,
            o=self._fuse(index, layer, _O),
            post_norm=layer.post_norm,
            gate_up=self._fuse(index, layer, _GATE_UP),
            down=self._fuse(index, layer, _DOWN),
            window=layer.window,
        )

    def _fuse(self, index: int, layer: LayerWeights, projections: tuple[int, ...]) -> _Product:
        weight = torch.cat([layer.projections[p] for p in projections])
        biases = [layer.biases[p] for p in projections]
        given = [bias for bias in biases if bias is not None]
        bias = torch.cat(given) if len(given) == len(biases) else None
        assert bias is not None or not given, "a family has biases on all of them, or on none"
        site = site_of(self._shape, index, projections)
        return _Product(self.kernels.linear(weight, bias), site)

    def forward(self, inputs: ForwardInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the tokens in `inputs.logits_indices`, [rows, vocab]; finite flags, [T] bool.

        The KV of all T tokens is written to the arena. The flags cover all layers up to the last
        attention; values that are not finite after it show in the logits.
        """
        assert self.lm_head is not None, "only the first rank has logits"
        x, finite = self.hidden(inputs)
        return self.lm_head(x), finite

    def hidden(self, inputs: ForwardInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Same as `forward`, with the inputs of the head, [rows, hidden], in place of logits."""
        kernels, work, eps = self.kernels, inputs.work, self.config.stream_eps
        residual = self.embed(inputs.input_ids)
        if self._embedding_scale != 1.0:
            residual *= self._embedding_scale
        x = kernels.rms_norm(residual, self.layers[0].input_norm, eps)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        runs, wanted = work.adapters, inputs.logits_indices
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            qkv = self._project(layer.qkv, x, runs)
            attended = kernels.attention(qkv, index, work, layer.head_norms, layer.window)
            if layer is self.layers[-1]:
                # A NaN never leaves the residual stream, so checking it here covers all layers.
                finite = self._on_all_ranks(is_finite(residual) & is_finite(attended))
                # The cache is complete: from here on only tokens whose logits are wanted matter.
                attended, residual = attended[wanted], residual[wanted]
                runs = inputs.wanted_adapters
            delta = self._project(layer.o, attended, runs)
            x = kernels.add_rms_norm(residual, delta, layer.post_norm, eps)
            activated = kernels.silu_mul(self._project(layer.gate_up, x, runs))
            delta = self._project(layer.down, activated, runs)
            x = kernels.add_rms_norm(residual, delta, next_norm, eps)
        return x, finite

    def _project(self, product: _Product, x: torch.Tensor, runs: AdapterRuns) -> torch.Tensor:
        """A product and what adapters add to it, summed over ranks if it is cut by inputs."""
        y = product.linear(x)
        if runs.tile_tables:
            self.kernels.add_lora(y, x, product.site, runs)
        if self.ranks is not None and product.site.projections[0] in CUT_BY_INPUTS:
            self.ranks.all_reduce(y)
        return y

    def _on_all_ranks(self, flags: torch.Tensor) -> torch.Tensor:
        """Flags that are set on every rank, as each sees its own heads only.   flags: [T] bool."""
        if self.ranks is None:
            return flags
        num_unset = (~flags).float()
        self.ranks.all_reduce(num_unset)
        return num_unset == 0


def attention_shape(
    config: DecoderConfig, block_size: int, max_model_len: int, dtype: torch.dtype
) -> AttentionShape:
    shape: ModelShape = config.shape
    cos, sin = config.rope.tables(max_model_len)
    return AttentionShape(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=block_size,
        cos=cos.to(dtype),
        sin=sin.to(dtype),
        scale=config.multipliers.attention,
    )
