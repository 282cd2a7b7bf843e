"""Names that trainers give to the tensors of an adapter, and the one that each has here.

PEFT's names for a text model are the standard: `base_model.model.<module>.lora_A.weight`. Others
differ by what wrapped the model (FSDP, torch.compile), by the adapter's name, or by a checkpoint
that has more than a text model.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from registry.errors import shown
from registry.formats.architecture import text_name
from registry.formats.peft_format import (
    EMBEDDING,
    WEIGHTS_FILE,
    Header,
    TensorInfo,
    file_fault,
    lora_names,
)

_PEFT = "base_model.model."
_MAX_NAME = 1024
"""Characters of a tensor's name; those of the largest models that are served have 90."""

_ZERO_3 = (
    "as DeepSpeed's ZeRO-3 saves parts of it: gather the weights before saving "
    "(state_dict=accelerator.get_state_dict(model), or zero_to_fp32.py), and push again"
)

# torch.compile, FSDP, activation checkpointing and DDP wrap modules at any depth.
_WRAPPER = re.compile(
    r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\."
)
# An adapter called "lora" lost its name and the word in front of it in older versions of PEFT.
_SIDE = re.compile(
    r"(.+?)(?:\.lora)?_(embedding_)?([AB])(?:\.(?!weight$|bias$)[^.]+)?(?:\.weight)?"
)
_SAVED = re.compile(r"(.+\.modules_to_save)\.[^.]+\.(weight|bias)")
_TOKENS = re.compile(r"(.+\.token_adapter\.trainable_tokens_delta)(?:\.[^.]+)?")
_OF_TRAINING = re.compile(r".*\.lora_(?:velora_embed|monteclora_sampler)(?:\..+)?")
_IN_MODEL = re.compile(r"(?:^|\.)model\.")
_IN_LAYERS = re.compile(r"(.*?)(?:layers\.\d+\..+)")

_HINTS = (
    (r".*\.lora_magnitude_vector.*", "it is DoRA's, of which the config says nothing; train "
     "without DoRA"),
    (r".*\.lora_[ab](?:\.weight)?",
     "mlx-lm or torchtune wrote it: push the folder with `chorale adapters push`, which converts "
     "mlx-lm's; torchtune's checkpointer writes PEFT's form"),
    (r".*\.(?:adapter\.)?linear_(?:in|out)\.weight",
     "NeMo wrote it: export the adapter to Hugging Face's form first"),
    (r".*\.lora_[AB](?:\.[^.]+)?\.bias", "a bias is no product of B and A; train with "
     "lora_bias=False"),
    (r".*(?:score|classifier|v_head|summary)\.(?:.*\.)?(?:weight|bias)",
     "it is the head of a classifier or of a value model, and only text is served; remove it if "
     "the layers alone are meant"),
    (r".*\.(?:weight|bias)",
     "it is a whole weight, and only products of B and A are served; save the adapter with "
     "PEFT's save_pretrained"),
)  # fmt: skip
"""Forms of names that are no LoRA, and what to do about them; the first that matches is meant."""


@dataclass(frozen=True, slots=True)
class UploadedTensors:
    """Tensors of an uploaded file under PEFT's names for a text model, in the order of the file.

    given: names in the file, by PEFT's.   towers: tensors of towers for images or sound, by their
    names in the file.   of_training: names of tensors that only training uses.
    layers_prefix: what the trainer's model writes before "layers.0", usually "model.".
    """

    header: Header
    given: Mapping[str, str]
    towers: Mapping[str, TensorInfo]
    of_training: tuple[str, ...]
    layers_prefix: str

    def shown(self, name: str) -> str:
        """A tensor's name in the file, for an error."""
        return shown(self.given.get(name, name))

    @property
    def has_head(self) -> bool:
        """Whether the trainer's model has a head; AutoModel's names begin inside of `model`."""
        return _IN_MODEL.search(self.layers_prefix) is not None

    def trained_name(self, module: str) -> str:
        """The name that a module of the base model has in the trainer's model."""
        if not module.startswith("model."):
            return module
        return self.layers_prefix + module.removeprefix("model.")

    def without(self, names: Iterable[str]) -> "UploadedTensors":
        """The same without some tensors, given by PEFT's names."""
        left_out = set(names)
        tensors = {n: t for n, t in self.header.tensors.items() if n not in left_out}
        return replace(self, header=replace(self.header, tensors=tensors))


def name_tensors(header: Header) -> UploadedTensors:
    """Give an uploaded file's tensors PEFT's names.

    Raises InvalidAdapter: invalid_header for a name that is too long, empty_tensor for a tensor
    without values, duplicate_tensor if two names mean one tensor.
    """
    tensors: dict[str, TensorInfo] = {}
    given: dict[str, str] = {}
    towers: dict[str, TensorInfo] = {}
    of_training: list[str] = []
    prefixes: list[str] = []
    for name, tensor in header.tensors.items():
        if len(name) > _MAX_NAME:
            message = f"{WEIGHTS_FILE} has a tensor whose name has {len(name)} characters; "
            raise file_fault("invalid_header", f"{message}the limit is {_MAX_NAME}")
        if 0 in tensor.shape:
            message = f"Tensor {shown(name)} has no values (shape {list(tensor.shape)}), {_ZERO_3}"
            raise file_fault("empty_tensor", message)
        found = peft_name(name)
        if found is None:
            towers[name] = tensor
        elif _OF_TRAINING.fullmatch(found):
            of_training.append(name)
        elif found in given:
            message = f"Tensors {shown(given[found])} and {shown(name)} are two for one; "
            raise file_fault("duplicate_tensor", f"{message}keep the one that was trained last")
        else:
            tensors[found], given[found] = tensor, name
            if match := _IN_LAYERS.fullmatch(_bare(name)):
                prefixes.append(match[1])
    prefix = max(set(prefixes), key=prefixes.count, default="model.")
    return UploadedTensors(
        replace(header, tensors=tensors), given, towers, tuple(of_training), prefix
    )


def peft_name(given: str) -> str | None:
    """PEFT's name of a tensor for the text model; None for a tensor of another tower.

    A name of no known form is kept behind PEFT's prefix, so that the checks refuse it.
    """
    name = text_name(_bare(given))
    if name is None:
        return None
    # AutoModel is the language model without its head, so its names begin inside it.
    if name.startswith(("layers.", "embed_tokens.")):
        name = f"model.{name}"
    if match := _SIDE.fullmatch(name):
        names = lora_names(match[1])
        if bool(match[2]) == (match[1] == EMBEDDING):
            return names[match[3] == "B"]
    elif match := _SAVED.fullmatch(name):
        name = f"{match[1]}.{match[2]}"
    elif match := _TOKENS.fullmatch(name):
        name = match[1]
    return _PEFT + name


def changed_together(given: str) -> str:
    """The module of a LoRA tensor, whose A and B change something only together; any other name
    is its own.
    """
    match = _SIDE.fullmatch(_bare(given))
    return match[1] if match else given


def hint(name: str) -> str:
    """Say what to do about a tensor that is no LoRA."""
    found = (advice for form, advice in _HINTS if re.fullmatch(form, name))
    return next(found, "its name has no form that is known; save it with PEFT's save_pretrained")


def _bare(name: str) -> str:
    """A name in the trainer's model, without what wraps the model."""
    name = _WRAPPER.sub("", name)
    while name.startswith(_PEFT):
        name = name.removeprefix(_PEFT)
    return name
