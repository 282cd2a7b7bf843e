"""The decoder of every model family, with LoRA beside every matrix."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.cpu.experts import ExpertMlp
from engine.cpu.inputs import ForwardInputs
from engine.cpu.products import fused
from engine.models.checkpoint import Checkpoint, LayerWeights
from engine.models.config import DecoderConfig
from engine.models.layer_norms import LayerNorms
from engine.models.ranks import Ranks
from engine.models.rounding import NO_ROUNDING, WeightRounding
from kernels.cpu.embedding_lora import EmbeddingLoRA
from kernels.cpu.plain import AttentionShape, CpuKernels, Linear
from kernels.cpu.work import AdapterRuns
from kernels.elementwise import is_finite, soft_cap_
from kernels.quantized import Weight
from kernels.work import HeadNorms, Site
from lora.layout import CUT_BY_INPUTS, Layout, ModelShape
from lora.shard import WHOLE
from lora.sites import added_head_site, embedding_sites, head_sites, site_of
from registry.formats.peft_format import MAX_ADDED_TOKENS

_QKV, _O, _GATE_UP, _DOWN = (0, 1, 2), (3,), (4, 5), (6,)


@dataclass(frozen=True, slots=True)
class _Product:
    """Projections side by side, and the site at which adapters add to them, if they may."""

    linear: Linear
    projections: tuple[int, ...]
    site: Site | None


@dataclass(frozen=True, slots=True)
class _DenseMlp:
    """An MLP that all tokens go through."""

    gate_up: _Product
    down: _Product


@dataclass(frozen=True, slots=True)
class _Layer:
    """Parts of a layer, in the order in which a token passes them.

    joint_norms: norms of q and of k that go over all heads together.   head_norms: norms of each
    head.   A family has one of them, or neither.
    """

    norms: LayerNorms[torch.Tensor]
    qkv: _Product
    joint_norms: tuple[torch.Tensor, torch.Tensor] | None
    head_norms: HeadNorms | None
    o: _Product
    mlp: _DenseMlp | ExpertMlp
    window: int | None
    rope: int


class Decoder:
    """The model on a CPU.

    weights: by their Hugging Face names, in the dtype to compute in.   rounding: see Checkpoint.
    ranks: the ranks that share the model, if there are several. Then `weights` are this rank's
    parts (see ShardedWeights), and `kernels` are for its heads; `config` is the whole model's.
    layout: of adapters that may change the embedding and the head; None if none do.
    Raises UnsupportedModel as Checkpoint does.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Weight],
        kernels: CpuKernels,
        ranks: Ranks | None = None,
        layout: Layout | None = None,
        rounding: WeightRounding = NO_ROUNDING,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.ranks = ranks
        shard = ranks.shard if ranks else WHOLE
        own = config.shard(shard.size)
        self._shape, self._experts = own.shape, own.experts
        checkpoint = Checkpoint(own, weights, rounding)
        # Only the first rank has logits and chooses tokens.
        is_first = shard.index == 0
        self.lm_head = kernels.linear(checkpoint.lm_head, None) if is_first else None
        tied_head = self.lm_head if config.tie_word_embeddings else None
        self.embed = kernels.embedding(checkpoint.embedding, tied_head)
        self._head_sites = list(head_sites(layout)) if layout else []
        has_ends = layout is not None and bool(layout.chunks)
        self._added_site = added_head_site(layout) if layout and has_ends else None
        self._embedding_lora = (
            EmbeddingLoRA(list(embedding_sites(layout))) if layout and has_ends else None
        )
        self._embedding_scale = config.embedding_scale(checkpoint.embedding.dtype)
        self.norm = checkpoint.norm
        self.layers = [self._place(i, layer) for i, layer in enumerate(checkpoint.layers())]
        self.weight_bytes = checkpoint.num_bytes

    def _place(self, index: int, layer: LayerWeights) -> _Layer:
        qk_norms, eps = layer.qk_norms, self.config.rms_norm_eps
        is_joint = self.config.qk_norms == "projections"
        return _Layer(
            norms=layer.norms,
            qkv=self._fuse(index, layer, _QKV),
            joint_norms=qk_norms if is_joint else None,
            head_norms=HeadNorms(*qk_norms, eps) if qk_norms and not is_joint else None,
            o=self._fuse(index, layer, _O),
            mlp=self._place_mlp(index, layer),
            window=layer.window,
            rope=self.config.ropes.numbers[index],
        )

    def _place_mlp(self, index: int, layer: LayerWeights) -> _DenseMlp | ExpertMlp:
        experts = self._experts[index]
        if experts is None or layer.experts is None:
            return _DenseMlp(self._fuse(index, layer, _GATE_UP), self._fuse(index, layer, _DOWN))
        return ExpertMlp(experts, layer.experts, self.kernels, self.config.activation)

    def _fuse(self, index: int, layer: LayerWeights, projections: tuple[int, ...]) -> _Product:
        weights = [layer.projections[p] for p in projections]
        biases = [layer.biases[p] for p in projections]
        is_adapted = projections[0] in self._shape.adapted
        return _Product(
            fused(self.kernels, weights, biases),
            projections,
            site_of(self._shape, index, projections) if is_adapted else None,
        )

    def forward(self, inputs: ForwardInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the tokens in `inputs.logits_indices`, [rows, vocab]; finite flags, [T] bool.

        The KV of all T tokens is written to the arena. The flags cover all layers up to the last
        attention; values that are not finite after it show in the logits.
        """
        x, finite = self.hidden(inputs)
        return self.logits(x, inputs.head_adapters.among(range(len(x)))), finite

    def logits(self, x: torch.Tensor, runs: AdapterRuns, num_added: int = 0) -> torch.Tensor:
        """Logits of the first rank, [rows, vocab + num_added].   x: [rows, hidden], from `hidden`.

        runs: the adapters of these rows that change the head.   num_added: how many tokens they add
        to the vocabulary; a token's logit is 0 where its adapter has no row for it.
        """
        assert self.lm_head is not None, "only the first rank has logits"
        logits = self.lm_head(x)
        if runs.tile_tables:
            for tokens, site in self._head_sites:
                self.kernels.add_lora(logits[:, tokens.start : tokens.stop], x, site, runs)
        if num_added and self._added_site is not None:
            added = logits.new_zeros(len(x), MAX_ADDED_TOKENS)
            if runs.tile_tables:
                self.kernels.add_lora(added, x, self._added_site, runs)
            logits = torch.cat([logits, added[:, :num_added]], dim=1)
        if (cap := self.config.soft_caps.logits) is not None:
            soft_cap_(logits, cap)
        return logits

    def hidden(self, inputs: ForwardInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Same as `forward`, with the inputs of the head, [rows, hidden], in place of logits."""
        kernels, work = self.kernels, inputs.work
        residual = self._embed(inputs.input_ids)
        if self._embedding_lora is not None and inputs.embedding_adapters.tile_tables:
            self._embedding_lora.add(residual, inputs.input_ids, inputs.embedding_adapters)
        if self._embedding_scale != 1.0:
            residual *= self._embedding_scale
        first_norm = self.layers[0].norms.before_attention
        x = residual
        if first_norm is not None:
            x = kernels.rms_norm(residual, first_norm, self.config.stream_eps)
        next_norms = [*(layer.norms.before_attention for layer in self.layers[1:]), self.norm]
        runs, wanted = work.adapters, inputs.logits_indices
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            qkv = self._project(layer.qkv, x, runs)
            if layer.joint_norms is not None:
                self._norm_jointly(qkv, layer.joint_norms)
            attended = kernels.attention(
                qkv, index, work, layer.head_norms, layer.window, layer.rope
            )
            if layer is self.layers[-1]:
                # A NaN never leaves the residual stream, so checking it here covers all layers.
                finite = self._on_all_ranks(is_finite(residual) & is_finite(attended))
                # The cache is complete: from here on only tokens whose logits are wanted matter.
                attended, residual = attended[wanted], residual[wanted]
                runs = inputs.wanted_adapters
            delta = self._project(layer.o, attended, runs)
            x = self._add(residual, delta, layer.norms.after_attention, layer.norms.before_mlp)
            delta = self._run_mlp(layer.mlp, x, runs)
            x = self._add(residual, delta, layer.norms.after_mlp, next_norm)
        return x, finite

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The base model's embeddings, [T, hidden]; zeros of tokens that adapters add."""
        is_added = token_ids >= self.config.vocab_size
        if not is_added.any():
            return self.embed(token_ids)
        residual = self.embed(token_ids.masked_fill(is_added, 0))
        residual[is_added] = 0
        return residual

    def _norm_jointly(self, qkv: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Norm q over all its heads, and k, in place.   norms: their weights."""
        start = 0
        for weight in norms:
            part = qkv[:, start : start + len(weight)]
            eps = self.config.rms_norm_eps
            part.copy_(self.kernels.rms_norm(part.contiguous(), weight, eps))
            start += len(weight)

    def _run_mlp(
        self, mlp: _DenseMlp | ExpertMlp, x: torch.Tensor, runs: AdapterRuns
    ) -> torch.Tensor:
        if isinstance(mlp, _DenseMlp):
            gate_up = self._project(mlp.gate_up, x, runs)
            activated = self.kernels.gated(gate_up, self.config.activation)
            return self._project(mlp.down, activated, runs)
        y = mlp(x)
        if self.ranks is not None:
            # All ranks choose the same experts, since they have the same x and the whole router.
            self.ranks.all_reduce(y)
        return y

    def _add(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor,
        after: torch.Tensor | None,
        before_next: torch.Tensor | None,
    ) -> torch.Tensor:
        """Add to the residual stream, in place; return what the next part reads from it.

        after: norm of what is added.   before_next: norm of what the next part reads.
        """
        if after is not None:
            delta = self.kernels.rms_norm(delta, after, self.config.rms_norm_eps)
        if before_next is None:
            return residual.add_(delta)
        return self.kernels.rms_norm(residual, before_next, self.config.stream_eps, delta)

    def _project(self, product: _Product, x: torch.Tensor, runs: AdapterRuns) -> torch.Tensor:
        """A product and what adapters add to it, summed over ranks if it is cut by inputs."""
        y = product.linear(x)
        if runs.tile_tables and product.site is not None:
            self.kernels.add_lora(y, x, product.site, runs)
        if self.ranks is not None and product.projections[0] in CUT_BY_INPUTS:
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
    tables = [rope.tables(max_model_len) for rope in config.ropes.different]
    cos, sin = (torch.stack(table) for table in zip(*tables, strict=True))
    return AttentionShape(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=block_size,
        cos=cos.to(dtype),
        sin=sin.to(dtype),
        scale=config.multipliers.attention,
        softcap=config.soft_caps.attention,
    )
