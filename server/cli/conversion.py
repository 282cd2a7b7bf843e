"""An adapter of any type that PEFT can merge, turned into an ordinary LoRA.

PEFT merges the adapter into the base weights, and what the merged weights differ by is the
adapter's effect on each module, whatever its type. The largest singular values of the effect are
the LoRA, and the others are its error. PEFT's own `convert_to_lora` finds the same factors, but
takes half as many types.

This is the only module of the command line that imports torch and PEFT, which the gateway does
without.
"""

import math
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import peft
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

from registry.formats.architecture import composite_class, may_change, text_name
from registry.formats.peft_format import EMBEDDING, HEAD, lora_names

MAX_RANK = 256
"""Largest rank that the server takes (registry.checks.validate.AdapterLimits)."""

_ENDS = {f"{EMBEDDING}.weight": EMBEDDING, f"{HEAD}.weight": HEAD}
_EMBEDDING, _HEAD = _ENDS
_FAULTS = (AttributeError, ImportError, KeyError, NotImplementedError, OSError, RuntimeError,
           SafetensorError, TypeError, ValueError)  # fmt: skip
"""Errors by which transformers and PEFT say that files are damaged or of another model."""

_MORE_THAN_MATRICES = (
    "It changes or adds {}, and a LoRA changes only the matrices of attention, embedding, head "
    "and, in a model without experts, MLP; train those only."
)
_T = TypeVar("_T")
_NUM_PROBES = 16
_PROBE_PRECISION = 1e-3
"""Difference of logits that rounding may cause, as a share of the largest logit."""


class NotConvertible(Exception):
    """An adapter has no ordinary LoRA, or none within the limits; the message says why."""


@dataclass(frozen=True, slots=True)
class Effect:
    """The matrix that an adapter adds to one module's weight.

    module: its name, such as "model.layers.0.self_attn.q_proj".   values: its singular values, the
    largest first.   a, b: the factors [k, in] and [out, k] of the k largest, k <= MAX_RANK.
    """

    module: str
    values: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor

    @classmethod
    def of(cls, module: str, difference: torch.Tensor) -> "Effect":
        """Factorize the difference of two weights, [out, in]; [in, out] for an embedding."""
        # Trained tokens are a few rows of a large matrix.
        rows = difference.any(dim=1).nonzero().view(-1)
        u, values, a = torch.linalg.svd(difference[rows], full_matrices=False)
        k = min(MAX_RANK, len(values))
        b = difference.new_zeros(len(difference), k)
        b[rows] = u[:, :k] * values[:k]
        a, b = (b.T, a[:k].T) if module == EMBEDDING else (a[:k], b)
        return cls(module, values.double(), a, b)

    def lost(self, rank: int) -> float:
        """Squared Frobenius norm of what a LoRA of this rank leaves out; of 0, the whole effect."""
        return float((self.values[rank:] ** 2).sum())

    def error(self, rank: int) -> float:
        """Relative error of a LoRA of this rank, in the Frobenius norm."""
        return math.sqrt(self.lost(rank) / self.lost(0))

    def rank_within(self, max_error: float) -> int:
        """The smallest rank whose error is at most `max_error`."""
        # lost[r] is the sum of the squares from r on, added from the smallest one.
        lost = (self.values**2).flip(0).cumsum(0).flip(0)
        return max(1, int((lost > max_error**2 * lost[0]).sum()))


def read_effects(model_dir: Path, adapter_dir: Path) -> list[Effect]:
    """Find what the adapter adds to each weight of the model in `model_dir`. Raises NotConvertible.

    The model is held in float32, and once more what it has for images, and fused experts, taken
    apart as the files have them.
    """
    merged = _merged(model_dir, adapter_dir)
    modules, config = _of_text(dict(merged.named_modules())), merged.config.to_dict()
    weights = _of_text(revert_weight_conversion(merged, merged.state_dict()))
    effects = []
    with torch.inference_mode():
        for name, stored in _stored_weights(model_dir):
            weight = weights.pop(name, None)
            if weight is None or torch.equal(weight, stored):
                continue
            module = name.removesuffix(".weight")
            is_projection = isinstance(modules.get(module), torch.nn.Linear)
            is_served = is_projection and may_change(config, name)
            if not is_served and name not in _ENDS:
                raise NotConvertible(_MORE_THAN_MATRICES.format(name))
            effects.append(Effect.of(module, weight - stored))
    if weights:
        raise NotConvertible(_MORE_THAN_MATRICES.format(next(iter(weights))))
    if not effects:
        raise NotConvertible("It changes nothing; save the adapter after training.")
    return effects


def choose_rank(effects: Sequence[Effect], max_error: float) -> int:
    """The smallest rank at which no module's error is above `max_error`. Raises NotConvertible."""
    worst = max(effects, key=lambda effect: effect.rank_within(max_error))
    rank = worst.rank_within(max_error)
    if rank > MAX_RANK:
        raise NotConvertible(
            f"{worst.module} needs rank {rank} for an error of at most {max_error:g}, and "
            f"{MAX_RANK} is the limit, at which its error is {worst.error(MAX_RANK):.3g}; allow a "
            "larger --max-error, or train a LoRA."
        )
    return rank


def write_lora(effects: Sequence[Effect], rank: int, adapter_dir: Path, out: Path) -> None:
    """Write a LoRA of this rank and of scale 1 as PEFT does."""
    source = peft.PeftConfig.from_pretrained(adapter_dir)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=[effect.module for effect in effects],
        task_type="CAUSAL_LM",
        base_model_name_or_path=source.base_model_name_or_path,
        inference_mode=True,
    )
    tensors = {}
    for effect in effects:
        name_of_a, name_of_b = lora_names(effect.module)
        tensors[name_of_a] = _of_rank(effect.a, rank)
        tensors[name_of_b] = _of_rank(effect.b.T, rank).T.contiguous()
    config.save_pretrained(out)
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})


def subtract_initial(model_dir: Path, adapter_dir: Path, initial: Path, out: Path) -> int:
    """Write the difference of a trained adapter and its initial one, by PEFT; returns its rank.

    An initialization such as PiSSA takes the initial adapter's product out of the base weights, so
    the difference is what training added to the original ones. It has twice the rank, and no error.
    Raises NotConvertible.
    """
    config = peft.PeftConfig.from_pretrained(adapter_dir)
    # Any other value would have PEFT change the base weights, which have no part in the difference.
    config.init_lora_weights = True
    with _quiet(), tempfile.TemporaryDirectory() as copies:
        # PEFT writes into the initial adapter's folder.
        copy = shutil.copytree(initial, Path(copies) / "initial")
        model = peft.PeftModel.from_pretrained(_base(model_dir), adapter_dir, config=config)
        model.save_pretrained(out, path_initial_model_for_weight_conversion=str(copy))
    (out / "README.md").unlink(missing_ok=True)
    written = peft.LoraConfig.from_pretrained(out)
    ranks: list[int] = [written.r, *written.rank_pattern.values()]
    return max(ranks)


def _of_rank(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """The first `rank` rows; rows of zeros follow where there are fewer."""
    taken = rows[:rank]
    return torch.cat([taken, taken.new_zeros(rank - len(taken), taken.shape[1])])


def _merged(model_dir: Path, adapter_dir: Path) -> PreTrainedModel:
    """The base model with the adapter merged into it, in float32. Raises NotConvertible.

    PEFT does not merge all adapters to what they compute (two that share a tied weight, for one),
    so both are compared on a few tokens.
    """
    with _quiet():
        base = _base(model_dir)
        towers = {n: w.clone() for n, w in base.state_dict().items() if text_name(n) is None}
        adapted = peft.PeftModel.from_pretrained(base, adapter_dir)
        if not hasattr(adapted.base_model, "merge_and_unload"):
            raise NotConvertible(
                f"Its type, {adapted.active_peft_config.peft_type.value}, does not change weights; "
                "train a LoRA."
            )
        _check_all_loaded(adapted, adapter_dir)
        probes = _probe_tokens(adapted)
        with torch.inference_mode():
            computed = adapted(probes, use_cache=False).logits
            merged: PreTrainedModel = adapted.base_model.merge_and_unload()
            difference = (merged(probes, use_cache=False).logits - computed).abs().max()
    if difference > _PROBE_PRECISION * computed.abs().max():
        raise NotConvertible(
            "PEFT does not merge it to what it computes, as if layers are replicated, or LoRA is "
            "on an embedding that is also the model's head; train a LoRA without that."
        )
    weights = merged.state_dict()
    for name, tower in towers.items():
        if not torch.equal(weights[name], tower):
            raise NotConvertible(_MORE_THAN_MATRICES.format(name))
    return merged


def _check_all_loaded(adapted: peft.PeftModel, adapter_dir: Path) -> None:
    """Check that PEFT leaves no tensor of the files out. Raises NotConvertible."""
    tensors = peft.utils.load_peft_weights(str(adapter_dir), device="cpu")
    result = peft.set_peft_model_state_dict(adapted, tensors)
    if result.unexpected_keys:
        raise NotConvertible(
            f"PEFT leaves {result.unexpected_keys[0]} out, since its config or the model has no "
            "place for it; train without it."
        )


def _probe_tokens(adapted: peft.PeftModel) -> torch.Tensor:
    """Tokens from all over the vocabulary, and those that were trained, [1, tokens]."""
    vocab_size = adapted.config.get_text_config().vocab_size
    trained = getattr(adapted.active_peft_config, "trainable_token_indices", None) or []
    lists = trained.values() if isinstance(trained, dict) else [trained]
    spread = range(0, vocab_size, -(-vocab_size // _NUM_PROBES))
    return torch.tensor([[*spread, *(token for tokens in lists for token in tokens)]])


def _base(model_dir: Path) -> PreTrainedModel:
    with _quiet(f"give the whole folder of its base model; {model_dir} cannot be read"):
        takes_images = composite_class(AutoConfig.from_pretrained(model_dir).to_dict())
        auto_class = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
        return auto_class.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)


def _of_text(parts: Mapping[str, _T]) -> dict[str, _T]:
    """Parts of the text model, by the names that they have in a checkpoint of it alone."""
    return {own: part for name, part in parts.items() if (own := text_name(name)) is not None}


def _stored_weights(model_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and float32 values of the text model's tensors in the files, one after the other.

    A head that is the embedding has no tensor of its own in the files.
    """
    # The model's own config is not asked, since PEFT changes it when it separates the two.
    is_tied = AutoConfig.from_pretrained(model_dir).tie_word_embeddings
    places: dict[str, Path] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            places |= dict.fromkeys(file.keys(), path)
    stored = _of_text({name: (name, path) for name, path in places.items()})
    if is_tied and _EMBEDDING in stored:
        stored.setdefault(_HEAD, stored[_EMBEDDING])
    for own, (name, path) in sorted(stored.items()):
        with safe_open(path, "pt") as file:
            yield own, file.get_tensor(name).float()


@contextmanager
def _quiet(what: str = "PEFT does not merge it into this model") -> Iterator[None]:
    """Keep the libraries' bars and warnings from the terminal; turn their errors into one line.

    what: is wrong if there is one.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except _FAULTS as error:
        lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
        # torch names the class alone in the first line, and the weight in the second.
        said = " ".join(lines[: 1 + lines[0].endswith(":")]).rstrip(".")
        raise NotConvertible(f"{what}: {said}.") from error
