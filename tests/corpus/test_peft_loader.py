"""Random configs and tensor names: what PEFT's loader makes of an adapter is what is served.

The modules that PEFT loads have the served A, B and scale. What PEFT leaves out without a word is
told by a warning or an error, and what it loads in whole is not refused.
"""

import io
import json
import re
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, event, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from registry.base.base_model import BaseModel
from registry.checks.validate import AdapterLimits
from registry.errors import InvalidAdapter
from registry.formats.peft_config import CONFIG_FILE
from registry.formats.peft_format import WEIGHTS_FILE, lora_names, read_canonical
from tests.corpus.world import randomize
from tests.registry.factories import validate_adapter
from tests.tiny_models import canonical_bytes, save_model

# PEFT warns of keys that match nothing; what is told here is the registry's to say.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:peft.*")

FUZZ = settings(
    deadline=None,
    derandomize=True,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PLACES = ("self_attn.q_proj", "mlp.up_proj", "layers.0.mlp.down_proj", "model.layers.1.self_attn")
_ENDS = ("lm_head", "embed_tokens", "model.embed_tokens")
_EXPRESSIONS = (
    r".*_proj",
    r".*\.(?:q|v)_proj",
    r"model\.layers\.\d+\.(?:self_attn|mlp)\.(?:q_proj|up_proj|down_proj)",
    r"^model\.layers\.[0-1]\.mlp\..+$",
    r".*?(?:self_attn|attention|mlp).*?\.(?:k_proj|gate_proj)",
    r"model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj",
    r"(model\.layers\.0\.self_attn\.(q|k)_proj)|(lm_head)",
    r".*\.1\.[a-z_]{3,9}\.\w+_proj",
    r"model\.language_model\.layers\.[01]\.mlp\.(?:up|down)_proj",
    r"layers\.[01]\.self_attn\..*",
    r"(?i).*\.Q_PROJ",
)
# RE2 has no such construct, so these are not compared with the tensors.
_NOT_LINEAR = (
    r"(?!.*\.mlp\.).*_proj",
    r"^(model\.layers(?=\.).*\.(q_proj|v_proj))$",
    r"^(model\.language_model(?=\.).*\.(q_proj|v_proj))$",
    r"\bmodel\.layers\.[\d]{1,}(?!.*\.experts\.\d)\..*?(?:self_attn|mlp).*?\.(?:q_proj|up_proj)",
)
_KEYS = (
    *_PROJECTIONS, *_PLACES, r".*\.1\..*", r"^model.layers.0.self_attn.q_proj", r"(?:up|down)_proj",
    r".*", r"mlp\.\w+", "lm_head", "nothing", "^layers.1.mlp.*", r"language_model\.layers\.0\..*",
)  # fmt: skip
_NOT_LINEAR_KEYS = (r"(?<!mlp\.)o_proj", r"(?=q)q_proj")

_names = st.lists(
    st.sampled_from((*_PROJECTIONS, *_PLACES, *_ENDS, "nothing")), min_size=1, max_size=5,
    unique=True,
)  # fmt: skip
_OF_MODULES = ("target_modules", "exclude_modules", "layers_to_transform")
"""Keys that decide which modules PEFT's loader gives an adapter."""
_layers = st.none() | st.sampled_from((0, 1, [0], [1], [0, 1], [], [7]))


def _patterns(numbers: st.SearchStrategy[int], keys: tuple[str, ...]) -> st.SearchStrategy[Any]:
    return st.dictionaries(st.sampled_from(keys), numbers, max_size=3)


@st.composite
def _configs(draw: st.DrawFn) -> dict[str, Any]:
    """Options of a LoraConfig that decide on which modules an adapter is, and how strong."""
    chosen: dict[str, Any] = {
        "r": draw(st.sampled_from((1, 3, 4))),
        "lora_alpha": draw(st.sampled_from((1, 4, 7))),
        "use_rslora": draw(st.booleans()),
        "rank_pattern": draw(_patterns(st.integers(1, 6), (*_KEYS, *_NOT_LINEAR_KEYS))),
        "alpha_pattern": draw(_patterns(st.integers(1, 9), _KEYS)),
        "target_modules": draw(
            _names | st.sampled_from((*_EXPRESSIONS, *_NOT_LINEAR)) | st.just("all-linear")
        ),
        "exclude_modules": draw(
            st.none()
            | st.lists(st.sampled_from((*_PROJECTIONS, *_PLACES)), max_size=2)
            | st.sampled_from((r".*\.0\..*", r"(?!.*q_proj).*"))
        ),
    }
    if isinstance(chosen["target_modules"], list):
        chosen["layers_to_transform"] = draw(_layers)
        if chosen["layers_to_transform"] is not None:
            chosen["layers_pattern"] = draw(
                st.sampled_from((None, "layers", ["layers"], ["h", "layers"], r"\w+", "h", []))
            )
    return chosen


# What wraps the trainer's model, as an expression for PEFT's name and what takes its place.
_WRITERS = {
    "PEFT": (r"^", ""),
    "a state dict": (r"(lora_(?:embedding_)?[AB])(?=\.weight|$)", r"\1.default"),
    "torch.compile": (r"^base_model", "_orig_mod.base_model"),
    "a compiled model": (r"^base_model\.model\.", "base_model.model._orig_mod."),
    "FSDP": (r"(layers\.\d+)\.", r"\1._fsdp_wrapped_module."),
    "DDP": (r"^", "module."),
    "no prefix": (r"^base_model\.model\.", ""),
}
_NAMES = ("default", "support", "lora", "q_proj")


_Effects = dict[str, tuple[torch.Tensor, torch.Tensor, float]]
"""A, B and scale by module."""


class WithImages(torch.nn.Module):
    """A text model at the place that it has in a model that takes images, too."""

    def __init__(self, text: Any) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.language_model = text.model
        self.lm_head = text.lm_head


_WHOLES = {
    "text": lambda text: text,
    "images": WithImages,
    "AutoModel": lambda text: text.model,
}
"""Models that are trained, of which the text model is the whole or a part."""
_OWN_NAMES = {"text": ("", ""), "images": ("model.language_model.", "model."),
              "AutoModel": ("", "model.")}  # fmt: skip
"""Beginnings of modules' names in such a model, and those of the text model alone."""


class Tiny:
    """The smallest model, as PEFT and as the registry see it.

    options: of tests.tiny_models.save_model.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        torch.set_num_threads(1)
        save_model(
            folder / "model", hidden_size=8, intermediate_size=12, head_dim=4,
            num_attention_heads=2, num_key_value_heads=1, **options,
        )  # fmt: skip
        self.base = BaseModel.load(folder / "model", "tiny", folder / "cache")
        self._config = AutoConfig.from_pretrained(folder / "model")
        self._weights = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
        self.folder = folder
        self._numbers = count()

    def new_folder(self) -> Path:
        folder = self.folder / str(next(self._numbers))
        folder.mkdir()
        return folder

    def adapted(
        self, chosen: dict[str, Any], whole: str = "text", adapter_name: str = "default"
    ) -> Any:
        """PEFT's model. Raises ValueError if the config is invalid, or matches no module."""
        model = AutoModelForCausalLM.from_config(self._config)
        model.load_state_dict(self._weights)
        # PEFT changes lists and sets that it is given.
        return get_peft_model(_WHOLES[whole](model), LoraConfig(**deepcopy(chosen)), adapter_name)

    def trained(
        self, chosen: dict[str, Any], whole: str = "text", adapter_name: str = "default"
    ) -> tuple[_Effects, dict[str, torch.Tensor]]:
        """A trained adapter, and its tensors as PEFT writes them."""
        try:
            model = self.adapted(chosen, whole, adapter_name)
        except ValueError:
            assume(False)
        torch.manual_seed(0)
        randomize(model)
        return effects(model), get_peft_model_state_dict(model, adapter_name=adapter_name)

    def write(self, chosen: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
        folder = self.new_folder()
        config = LoraConfig().to_dict() | chosen
        (folder / CONFIG_FILE).write_text(json.dumps(config))
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS_FILE)
        return folder

    def served(self, folder: Path) -> _Effects:
        """The A, B and scale that are served of a folder, by module. Raises InvalidAdapter."""
        data = canonical_bytes(folder, self.base)
        canonical = read_canonical(io.BytesIO(data), len(data))
        tensors = load(data)
        return {
            name: (*(tensors[tensor] for tensor in lora_names(name)), effect.scale)
            for name, effect in canonical.modules.items()
        }

    def warnings(self, folder: Path) -> str:
        config = (folder / CONFIG_FILE).read_bytes()
        weights = folder / WEIGHTS_FILE
        return "\n".join(validate_adapter(config, weights, self.base, AdapterLimits()).warnings)


def effects(model: Any) -> _Effects:
    """A, B and scale of each module that PEFT has put an adapter on."""
    found = {}
    for name, layer in model.base_model.model.named_modules():
        if isinstance(layer, LoraLayer):
            [(adapter, scale)] = layer.scaling.items()
            if adapter in layer.lora_embedding_A:
                pair = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
            else:
                pair = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
            found[name] = (*(tensor.detach() for tensor in pair), scale)
    return found


def assert_equal(served: _Effects, expected: _Effects) -> None:
    assert served.keys() == expected.keys()
    for name, (a, b, scale) in served.items():
        assert torch.equal(a, expected[name][0]), name
        assert torch.equal(b, expected[name][1]), name
        assert scale == torch.tensor(expected[name][2]).item(), name


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Tiny(tmp_path_factory.mktemp("loader"), tied=False)


@settings(FUZZ, max_examples=150)
@given(
    chosen=_configs(),
    whole=st.sampled_from(sorted(_WHOLES)),
    writer=st.sampled_from(sorted(_WRITERS)),
    adapter=st.sampled_from(_NAMES),
)
def test_what_was_trained_is_served_whoever_wrote_it(tiny, chosen, whole, writer, adapter):
    trained, tensors = tiny.trained(chosen, whole, adapter)
    assume(whole == "text" or any(".layers." in f".{name}" for name in trained))
    pattern, replacement = _WRITERS[writer]
    named = {re.sub(pattern, replacement, name, count=1): t for name, t in tensors.items()}
    served = tiny.served(tiny.write(chosen, named))
    theirs, own = _OWN_NAMES[whole]
    assert_equal(
        served,
        {
            name if name == "lm_head" else own + name.removeprefix(theirs): effect
            for name, effect in trained.items()
        },
    )


@settings(FUZZ, max_examples=150)
@given(chosen=_configs(), other=_configs(), data=st.data())
def test_what_peft_leaves_out_of_an_adapter_with_another_config_is_told(tiny, chosen, other, data):
    _, tensors = tiny.trained(chosen)
    key = data.draw(st.sampled_from((*sorted(chosen), *_OF_MODULES, *_OF_MODULES)), label="key")
    changed = chosen | {key: other.get(key)}
    folder = tiny.write(changed, tensors)
    try:
        model = tiny.adapted(changed)
    except ValueError:
        return  # PEFT says so itself
    try:
        result = set_peft_model_state_dict(model, tensors)
    except RuntimeError:  # other ranks
        loaded, is_whole = {}, False
    else:
        lacking = {name.partition(".lora_")[0] for name in result.missing_keys if "lora_" in name}
        loaded = {
            name: effect
            for name, effect in effects(model).items()
            if f"base_model.model.{name}" not in lacking
        }
        is_whole = not lacking and not result.unexpected_keys
    if not is_whole:
        try:
            tiny.served(folder)
        except InvalidAdapter as error:
            event(error.code)
            return
    served = tiny.served(folder)
    event("served" if is_whole else "served, told")
    assert_equal({name: served[name] for name in loaded}, loaded)
    if not is_whole:
        assert re.search(r"PEFT would leave them out|not_compared", tiny.warnings(folder))
