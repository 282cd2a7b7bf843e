"""Chooses the base model that an uploaded adapter is for, by its config and its tensors.

The tensors' shapes come first, since a config may name a folder on another machine or quantised
weights. But the tensors of a fine-tuned model have the shapes of the model that it was made from.
"""

from collections.abc import Sequence
from typing import BinaryIO

from registry.base.base_model import BaseModel
from registry.base.base_names import last_name, plain_name
from registry.checks.tensor_names import name_tensors
from registry.checks.token_rows import END_WEIGHTS
from registry.checks.validate import AdapterLimits, find_copies, read_weights_header
from registry.errors import InvalidAdapter, shown
from registry.formats.peft_config import CONFIG_FILE, PeftConfig
from registry.formats.peft_format import (
    EMBEDDING,
    HEAD,
    MAX_ADDED_TOKENS,
    Header,
    file_fault,
    split_lora_name,
)

_OF_TOKENS = {(EMBEDDING, "A"), (HEAD, "B")}
"""Sides of a LoRA that have a row or a column for each token."""


def choose_base(
    candidates: Sequence[BaseModel], config: bytes, weights: BinaryIO, limits: AdapterLimits
) -> BaseModel:
    """The base model that the adapter is for. A single candidate is chosen unread.

    config: the content of adapter_config.json.   weights: open, at any place.
    Raises InvalidAdapter (base_model_unclear if the files fit no candidate or several), TooLarge.
    """
    if len(candidates) == 1:
        return candidates[0]
    trained_on = PeftConfig.parse(config).base_model_name
    header = read_weights_header(weights, limits)
    return choose(candidates, trained_on, name_tensors(header).header)


def choose(candidates: Sequence[BaseModel], trained_on: str | None, header: Header) -> BaseModel:
    """The only candidate that the tensors fit; if they fit several, the one that the config names.

    If they fit none, it is the one that the config names too, and the checks say why it does not
    fit. Candidates of one variant are one base model, and the first of them is chosen.
    trained_on: base_model_name_or_path. Raises InvalidAdapter (base_model_unclear).
    """
    fitting = [base for base in candidates if fits(base, header)]
    fitting = fitting or [base for base in candidates if fits(base, header, is_resized=True)]
    named = _named(fitting or candidates, trained_on or "")
    possible = named or fitting
    if len({base.variant for base in possible}) == 1:
        return possible[0]
    raise _unclear(candidates, possible, trained_on)


def fits(base: BaseModel, header: Header, *, is_resized: bool = False) -> bool:
    """Whether the base model has a module of the same inputs or outputs for each tensor of a LoRA,
    and tensors of the same shapes for all copies. The checks judge everything else.

    is_resized: whether embedding and head may have fewer tokens or a few more.
    """

    def is_size(found: int, wanted: int, is_vocabulary: bool) -> bool:
        most = wanted + MAX_ADDED_TOKENS
        return found == wanted or (is_resized and is_vocabulary and found <= most)

    modules = base.all_modules
    for name, tensor in header.tensors.items():
        named = split_lora_name(name)
        if named is None:
            continue
        module, side = named
        if module not in modules or len(tensor.shape) != 2:
            return False
        size, wanted = tensor.shape[side == "A"], modules[module][side == "B"]
        if not is_size(size, wanted, (module, side) in _OF_TOKENS):
            return False
    for name, copied in find_copies(header, base).items():
        if copied in base.tensors:  # what is stored quantised has no shape to compare
            shape, wanted_shape = header.tensors[name].shape, base.tensors[copied].shape
            is_end = copied in END_WEIGHTS and len(shape) == 2
            if shape[is_end:] != wanted_shape[is_end:]:
                return False
            if is_end and not is_size(shape[0], wanted_shape[0], True):
                return False
    return True


def _named(candidates: Sequence[BaseModel], trained_on: str) -> list[BaseModel]:
    """The candidates of this name; if there are none, those whose weights may have been quantised
    to those of this name, or the other way round.
    """
    name, plain = last_name(trained_on), plain_name(trained_on)
    exactly = [base for base in candidates if name in base.known_as]
    return exactly or [base for base in candidates if plain in map(plain_name, base.known_as)]


def _unclear(
    candidates: Sequence[BaseModel], possible: Sequence[BaseModel], trained_on: str | None
) -> InvalidAdapter:
    said = f"names {shown(trained_on)}" if trained_on else "names none"
    names = ", ".join(base.model_id for base in possible or candidates)
    fit = f"could be for {names}" if possible else f"fits none of {names}"
    message = f"The base model is unclear: {CONFIG_FILE} {said}, and the adapter {fit}; upload it "
    message += "again, and name its base model with base_model"
    return file_fault("base_model_unclear", message, "base_model")
