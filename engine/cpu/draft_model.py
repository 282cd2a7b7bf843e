"""A draft model on the CPU: its weights, without adapters, and its KV in slabs of the arena."""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.cpu.backend import open_decoder
from engine.cpu.decoder import Decoder
from engine.cpu.inputs import InputBuilder
from engine.errors import UnsupportedModel
from engine.models.config import DecoderConfig
from engine.models.weights import give_back_memory, load_config
from engine.steps.batch import Batch, ScheduledRow
from engine.steps.measurement import measure_steps, on_processor
from lora.layout import Layout, ModelShape
from lora.packed import PackedForm

logger = logging.getLogger(__name__)

_BLOCK_UNIT = 16
"""Number that block sizes are multiples of, as kernels want it."""


class CpuDraftModel:
    """A model that drafts on the CPU; see engine.drafts.model.DraftModel.

    arena: [slabs, slab_bytes] uint8, which nobody uses yet, as steps are measured on it.
    form: of the model's KV in it.   most_tokens: of a step.   max_model_len: of a row.
    """

    def __init__(
        self,
        model: Decoder,
        arena: torch.Tensor,
        form: PackedForm,
        most_tokens: int,
        max_model_len: int,
    ) -> None:
        self.block_size = form.layout.block_size
        self._model = model
        self._inputs = InputBuilder(arena, form)
        self.curve = measure_steps(
            on_processor(self.next_tokens), self.block_size, len(arena), most_tokens, max_model_len
        )

    @torch.inference_mode()
    def next_tokens(self, rows: Sequence[ScheduledRow]) -> list[int]:
        """See engine.drafts.model.DraftModel."""
        inputs = self._inputs.build(Batch(0, tuple(rows)))
        x, _ = self._model.hidden(inputs)
        if not len(x):
            return []
        token_ids: list[int] = self._model.logits(x, inputs.wanted_adapters).argmax(-1).tolist()
        return token_ids


def open_draft_model(
    config: EngineConfig, served: DecoderConfig, arena: torch.Tensor
) -> CpuDraftModel:
    """Open the draft model of an engine.   config: with a draft_model_dir.   served: the model that
    it drafts for.   arena: see CpuDraftModel.

    Raises UnsupportedModel.
    """
    assert config.draft_model_dir is not None, "no draft model is wanted"
    assert config.max_model_len is not None, "not resolved yet"
    assert config.max_num_batched_tokens is not None, "not resolved yet"
    folder, served_folder = Path(config.draft_model_dir), Path(config.model_dir)
    model_config = DecoderConfig.parse(load_config(folder)).at_length(config.max_model_len)
    _check_vocabulary(folder, model_config.vocab_size, served_folder, served.vocab_size)
    layout = draft_layout(model_config.shape, getattr(torch, config.dtype).itemsize, arena.shape[1])
    if layout is None:
        raise UnsupportedModel(
            f"draft_model: the keys and values of {_BLOCK_UNIT} tokens of {folder} take more than "
            f"a slab of {arena.shape[1]} bytes, which holds a block of {served_folder}: take a "
            "smaller draft model, or a larger block_size"
        )
    own = replace(config, model_dir=str(folder))
    model = open_decoder(own, model_config, layout.block_size)
    give_back_memory()
    form = PackedForm(layout, config.dtype, config.base_revision)
    most_tokens, max_model_len = config.max_num_batched_tokens, config.max_model_len
    drafting = CpuDraftModel(model, arena, form, most_tokens, max_model_len)
    logger.info(
        "the draft model %s has %d tokens of KV in a slab; its %s",
        folder, layout.block_size, drafting.curve,
    )  # fmt: skip
    return drafting


def draft_layout(shape: ModelShape, itemsize: int, slab_bytes: int) -> Layout | None:
    """The layout with most tokens whose KV fits into a slab; None if too few do."""
    token_bytes = Layout(shape, itemsize, 1, itemsize).kv_block_elems * itemsize
    block_size = slab_bytes // token_bytes // _BLOCK_UNIT * _BLOCK_UNIT
    return Layout(shape, itemsize, block_size, itemsize) if block_size else None


def _check_vocabulary(folder: Path, size: int, served_folder: Path, served_size: int) -> None:
    """Raise UnsupportedModel if token ids of one model mean something else to the other."""
    if size != served_size:
        raise UnsupportedModel(
            f"draft_model: {folder} has a vocabulary of {size} tokens, and {served_folder} of "
            f"{served_size}: take a draft model with the same vocabulary"
        )
    words, served_words = _vocabulary(folder), _vocabulary(served_folder)
    if words is None or served_words is None or words == served_words:
        return
    word = min(words.items() ^ served_words.items())[0]
    raise UnsupportedModel(
        f"draft_model: the tokenizer.json of {folder} and of {served_folder} do not agree, for one "
        f"on {word!r}: take a draft model with the same vocabulary"
    )


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Token ids by token, as tokenizer.json has them; None without that file."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    if not isinstance(words, dict):  # pairs of token and score, in the order of ids
        words = {word: token_id for token_id, (word, _) in enumerate(words)}
    return words | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
