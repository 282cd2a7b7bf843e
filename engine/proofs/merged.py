"""The plainest way to run an adapter: merged into the base weights, in float32, without a cache.

It shares the checkpoint and a few plain torch functions (kernels.elementwise) with the serving
path, but no tiles, no arena and no compiled kernels. On a CPU it works in units of a few
milliseconds, so that it can run between the steps of an engine that serves; on a device it runs
beside them.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from engine.models.checkpoint import expert_projection_name, projection_name, router_name
from engine.models.config import DecoderConfig
from engine.models.experts import Experts
from engine.models.weights import ServedNumbers
from engine.proofs.beside import Beside
from engine.proofs.proof import MOST_TOKENS, Compared, TokenSequence
from kernels.elementwise import apply_rope, gated, rms_norm, soft_cap_
from kernels.routing import choose_experts
from lora.canonical import CanonicalWeights, ModuleDelta, as_float32
from lora.device import Device
from lora.layout import FUSED, PROJECTIONS
from registry.formats.peft_format import EMBEDDING, HEAD

_UNIT_ELEMENTS = 1 << 19
"""Weights that one unit reads, merges and multiplies: 2 ms for 32 tokens on one core, 3 at most.

Units of four times as many take 3 ms, and 9 at most, without making the whole pass faster (135M
shape: 0.68 s, and 0.80 s with the larger units).
"""
_DEVICE_UNIT_ELEMENTS = 1 << 22
"""The same on a device: 8 MiB of bf16 to read and to copy, and 1 GFLOP for 32 tokens."""

_BYTES_PER_ELEMENT = 16
"""Device memory of a unit: 8 bytes for each weight if they are numbers, 14 if they are rounded."""
_LIBRARY_BYTES = 64 << 20
"""Device memory for what the thread's products need themselves; cuBLAS takes 32 MiB on an H100."""
_CPU = torch.device("cpu")
_Q, _K, _V, _O, _GATE, _UP, _DOWN = range(7)


def scratch_bytes(config: DecoderConfig, num_tokens: int = MOST_TOKENS) -> int:
    """Most memory of a device that a run of so many tokens takes at a time."""
    shape = config.shape
    hidden, attended = shape.hidden_size, shape.num_heads * shape.head_dim
    width = max(config.mlp_width, *(experts.width for experts in config.experts if experts), 0)
    largest = hidden * max(attended, width, config.vocab_size)
    row = 3 * hidden + max(5 * width, 10 * attended)
    unit = _BYTES_PER_ELEMENT * min(_DEVICE_UNIT_ELEMENTS, largest)
    return _LIBRARY_BYTES + unit + 2 * num_tokens * 4 * row


class MergedModel:
    """Runs tokens on weights that are read a few rows at a time; see engine.proofs.proof.Reference.

    weights: what is served.   unrounded: the same before it was rounded to few bits, if it was, and
    if there are such weights.   device: where to compute, and where the weights are; None for this
    thread. Its products of float32 must not be rounded to TF32.
    """

    def __init__(
        self,
        weights: ServedNumbers,
        config: DecoderConfig,
        unrounded: ServedNumbers | None = None,
        device: Device | None = None,
    ) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self._weights = weights
        self._unrounded = unrounded
        self._there = device.torch_device if device else _CPU
        self._beside = Beside(device) if device else None

    def own_tokens(self, object_path: Path) -> tuple[tuple[int, ...] | None, Sequence[int]]:
        """Invocation tokens of an activated LoRA, None for other adapters; and the tokens that the
        adapter adds to the vocabulary. Raises AdapterError.
        """
        adapter, size = CanonicalWeights(object_path), self.vocab_size
        return adapter.invocation_tokens, range(size, adapter.vocab_size or size)

    def compare(
        self, sequences: Sequence[TokenSequence], object_path: Path
    ) -> Generator[None, None, Compared]:
        """Logprobs after the tokens of all sequences; yields between units.

        Raises AdapterError; OSError if a file cannot be read; MemoryError if the device is full.
        """
        compared = yield from self._run(self._weights, sequences, object_path)
        if self._unrounded is None:
            return compared
        whole = yield from self._run(self._unrounded, sequences, object_path)
        return replace(compared, unrounded=whole.merged)

    def _run(
        self, weights: ServedNumbers, sequences: Sequence[TokenSequence], object_path: Path
    ) -> Generator[None, None, Compared]:
        steps = self._steps(weights, sequences, object_path)

        @torch.inference_mode()  # a generator must not leave it on while it is suspended
        def advance() -> Compared | None:
            try:
                next(steps)
            except StopIteration as done:
                compared: Compared = done.value
                return compared
            except torch.OutOfMemoryError as error:
                raise MemoryError("the device has no memory left for the merged weights") from error
            return None

        if self._beside is not None:
            return (yield from self._beside.run(advance))
        while (compared := advance()) is None:
            yield
        return compared

    def _steps(
        self, weights: ServedNumbers, sequences: Sequence[TokenSequence], object_path: Path
    ) -> Generator[None, None, Compared]:
        adapter = CanonicalWeights(object_path)
        unit = _DEVICE_UNIT_ELEMENTS if self._beside else _UNIT_ELEMENTS
        run = _Run(self.config, weights, adapter, sequences, self._there, unit)
        return (yield from run.steps())


@dataclass
class _Run:
    """Two forward passes of the same tokens side by side, rows [0, T) on the base model, [T, 2 T)
    merged.

    there: where the weights are and products are computed.   unit_elements: see _UNIT_ELEMENTS.
    bounds: start and end of each sequence among the 2 T rows.
    merged: rows that the adapter applies to, [n]; the others see the base weights.
    """

    config: DecoderConfig
    weights: ServedNumbers
    adapter: CanonicalWeights
    sequences: Sequence[TokenSequence]
    there: torch.device
    unit_elements: int

    def __post_init__(self) -> None:
        lengths = 2 * [len(sequence.token_ids) for sequence in self.sequences]
        self.bounds = list(pairwise(accumulate(lengths, initial=0)))
        merged = zip(self.sequences, self.bounds[len(self.sequences) :], strict=True)
        rows = [row for s, (start, end) in merged for row in range(start + s.adapter_start, end)]
        self.merged = torch.tensor(rows).to(self.there)
        tables = [rope.tables(max(lengths)) for rope in self.config.ropes.different]
        at = torch.cat([torch.arange(length) for length in lengths])
        self.turns = [(cos[at].to(self.there), sin[at].to(self.there)) for cos, sin in tables]
        self.activate = partial(gated, activation=self.config.activation)

    def steps(self) -> Generator[None, None, Compared]:
        factors, norms = self.config.multipliers, self.config.norms
        x = factors.embedding * (yield from self._embed())
        for layer in range(self.config.shape.num_layers):
            normed = self._norm_in(layer, x, norms.before_attention)
            q = yield from self._project(layer, _Q, normed)
            k = yield from self._project(layer, _K, normed)
            v = yield from self._project(layer, _V, normed)
            attended = self._attend(layer, q, k, v)
            yield
            added = yield from self._project(layer, _O, attended)
            x = x + factors.residual * self._norm_in(layer, added, norms.after_attention)
            normed = self._norm_in(layer, x, norms.before_mlp)
            added = yield from self._mlp(layer, normed)
            x = x + factors.residual * self._norm_in(layer, added, norms.after_mlp)
        x = self._norm(x, "model.norm.weight")
        head = EMBEDDING if self.config.tie_word_embeddings else HEAD
        # A tied head and the embedding share a weight, but each has its own delta, as in PEFT.
        delta, size = self.adapter.delta(HEAD), self.config.vocab_size
        # Logits leave the device piece by piece; over a large vocabulary they would take the most.
        logits = yield from self._multiply(f"{head}.weight", size, x, delta, self.merged, _CPU)
        if (num_added := (self.adapter.vocab_size or size) - size) > 0:
            # The base model's rows of added tokens are zeros.
            added = torch.zeros(len(x), num_added)
            if delta is not None:
                rows = delta.scale * (self._read(delta.b[size:]) @ self._read(delta.a))
                added[self.merged.to(_CPU)] = linear(x[self.merged], rows).to(_CPU)
            logits = torch.cat([logits, added], dim=1)
        logits *= factors.logits
        if (cap := self.config.soft_caps.logits) is not None:
            soft_cap_(logits, cap)
        base, merged = logits.chunk(2)
        # The base model does not choose among added tokens.
        before = base - base[:, :size].logsumexp(dim=-1, keepdim=True)
        return Compared(before.numpy(), merged.log_softmax(dim=-1).numpy())

    def _embed(self) -> Generator[None, None, torch.Tensor]:
        """Embeddings, [2 T, hidden]; the table, the largest tensor, is read a row at a time."""
        ids = [token for sequence in self.sequences for token in sequence.token_ids]
        rows: dict[int, torch.Tensor] = {}
        for token in dict.fromkeys(ids):
            is_added = token >= self.config.vocab_size
            first = 0 if is_added else token
            row = self.weights.rows(f"{EMBEDDING}.weight", first, first + 1)
            rows[token] = torch.zeros_like(row) if is_added else row
            yield
        x = torch.cat([rows[token] for token in ids]).repeat(2, 1)
        if (delta := self.adapter.delta(EMBEDDING)) is not None:
            tokens = torch.tensor(ids).repeat(2)[self.merged.to(_CPU)]
            columns = self._read(delta.a[:, tokens.numpy()])
            x[self.merged] += delta.scale * (self._read(delta.b) @ columns).T
            yield
        return x

    def _read(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        """Values of the adapter, as they are stored."""
        return torch.from_numpy(as_float32(values)).to(self.there)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.weights[name] + self.config.norm_offset
        return rms_norm(x, weight, self.config.rms_norm_eps)

    def _norm_in(self, layer: int, x: torch.Tensor, name: str | None) -> torch.Tensor:
        """Norm by one of a layer's norms, if it has this one."""
        return x if name is None else self._norm(x, f"model.layers.{layer}.{name}.weight")

    # ---- a layer ----

    def _project(
        self, layer: int, projection: int, x: torch.Tensor
    ) -> Generator[None, None, torch.Tensor]:
        """Outputs of a projection, [2 T, out], by merged weights where the adapter applies."""
        module = projection_name(layer, projection)
        _, num_outputs = self.config.features(projection)
        delta = self.adapter.delta(module) or self._fused_delta(layer, projection)
        y = yield from self._multiply(f"{module}.weight", num_outputs, x, delta, self.merged)
        if self.config.biases[projection]:
            y = y + self.weights[f"{module}.bias"]
        return y

    def _mlp(self, layer: int, x: torch.Tensor) -> Generator[None, None, torch.Tensor]:
        experts = self.config.experts[layer]
        if experts is not None:
            return (yield from self._mix(layer, experts, x))
        gate = yield from self._project(layer, _GATE, x)
        up = yield from self._project(layer, _UP, x)
        return (yield from self._project(layer, _DOWN, self.activate(gate, up)))

    def _mix(
        self, layer: int, experts: Experts, x: torch.Tensor
    ) -> Generator[None, None, torch.Tensor]:
        """Outputs of each row's experts, summed by weights. Experts that no row has are not read.

        Adapters do not change experts, only what they read.
        """
        logits = linear(x, self.weights[f"{router_name(layer)}.weight"])
        chosen, weights = choose_experts(
            logits, experts.per_token, norms_weights=experts.norms_weights
        )
        yield
        total = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            output = yield from self._run_expert(layer, expert, experts.width, x[rows])
            total.index_add_(0, rows, weights[rows, places, None] * output)
        return total

    def _run_expert(
        self, layer: int, expert: int, width: int, x: torch.Tensor
    ) -> Generator[None, None, torch.Tensor]:
        gate_name, up_name, down_name = (
            f"{expert_projection_name(layer, expert, projection)}.weight"
            for projection in (_GATE, _UP, _DOWN)
        )
        gate = yield from self._multiply(gate_name, width, x)
        up = yield from self._multiply(up_name, width, x)
        return (yield from self._multiply(down_name, x.shape[1], self.activate(gate, up)))

    def _fused_delta(self, layer: int, projection: int) -> ModuleDelta | None:
        """The update of a projection by an adapter of a module that consists of several."""
        for name, projections in FUSED.items():
            if projection in projections:
                widths = [self.config.features(p)[1] for p in projections]
                start = sum(widths[: projections.index(projection)])
                outputs = slice(start, start + widths[projections.index(projection)])
                module = projection_name(layer, projection).replace(PROJECTIONS[projection], name)
                return self.adapter.delta(module, outputs)
        return None

    def _multiply(
        self,
        name: str,
        num_outputs: int,
        x: torch.Tensor,
        delta: ModuleDelta | None = None,
        merged: Sequence[int] | torch.Tensor = (),
        to: torch.device | None = None,
    ) -> Generator[None, None, torch.Tensor]:
        """Compute x @ weight.T, a few rows of the weight at a time.

        merged: rows of x that the delta applies to.   to: where the outputs are put; None for where
        they are computed.
        """
        y = torch.empty(len(x), num_outputs, device=to or self.there)
        read = self.weights.inputs(name, x)
        a = None if delta is None else self._read(delta.a)
        num_rows = max(1, self.unit_elements // x.shape[1])
        for start in range(0, num_outputs, num_rows):
            end = min(start + num_rows, num_outputs)
            part = linear(read, self.weights.rows(name, start, end))
            if delta is not None and a is not None and len(merged):
                b = self._read(delta.b[start:end])
                part[merged] += linear(x[merged], delta.scale * (b @ a))
            y[:, start:end] = part
            yield
        return y

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Causal attention of every sequence with itself; [2 T, heads * head_dim]."""
        shape, prefix = self.config.shape, f"model.layers.{layer}.self_attn"
        if self.config.qk_norms == "projections":
            q = self._norm(q, f"{prefix}.q_norm.weight")
            k = self._norm(k, f"{prefix}.k_norm.weight")
        q, k, v = (
            t.view(len(t), heads, shape.head_dim)
            for t, heads in ((q, shape.num_heads), (k, shape.num_kv_heads), (v, shape.num_kv_heads))
        )
        if self.config.qk_norms == "heads":
            q = self._norm(q, f"{prefix}.q_norm.weight")
            k = self._norm(k, f"{prefix}.k_norm.weight")
        turn = self.turns[self.config.ropes.numbers[layer]]
        q, k = apply_rope(q, *turn), apply_rope(k, *turn)
        repeats = shape.num_heads // shape.num_kv_heads
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        out = torch.empty_like(q)
        for start, end in self.bounds:
            mask = _visible(end - start, self.config.windows[layer]).to(self.there)
            query, key, value = (t[start:end].transpose(0, 1) for t in (q, k, v))
            out[start:end] = self._softmax(query, key, value, mask).transpose(0, 1)
        return out.flatten(1)

    def _softmax(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attended values of [heads, T, head_dim] each."""
        scale = self.config.multipliers.attention
        if (cap := self.config.soft_caps.attention) is None:
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        scores = q @ k.transpose(1, 2) * (scale or q.shape[-1] ** -0.5)
        capped = cap * torch.tanh(scores / cap)
        return capped.masked_fill(~mask, -torch.inf).softmax(dim=-1) @ v


def _visible(length: int, window: int | None) -> torch.Tensor:
    """[length, length] bool: which keys (columns) a query (row) sees."""
    at = torch.arange(length)
    causal = at[None, :] <= at[:, None]
    return causal if window is None else causal & (at[None, :] > at[:, None] - window)
