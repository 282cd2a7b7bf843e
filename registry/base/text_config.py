"""The config.json of a checkpoint that also takes images, as its text model alone would have it.

The registry, the engine and plans read configs through this, and know of no nesting.
"""

from collections.abc import Collection, Mapping
from typing import Any

from registry.formats.architecture import ARCHITECTURES, COMPOSITES, composite_class

_HEAD, _TIED = "lm_head.weight", "tie_word_embeddings"
_OF_THE_WHOLE = (
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "quantization_config",
    "compression_config",
)
"""Settings that count before those of the same name in text_config."""
_NOT_OF_TEXT = frozenset({"vision_config", "model_type"})
"""Settings of a config that has those of the text model beside them, in no part of its own."""

_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip


def _text_model(architecture: str, *sizes: int | None, **others: Any) -> dict[str, Any]:
    settings = {"architectures": [architecture], "model_type": ARCHITECTURES[architecture]}
    return settings | dict(zip(_SIZES, sizes, strict=True)) | {_TIED: False, **others}


_DEFAULTS = {
    "llama": _text_model("LlamaForCausalLM", 32_000, 4096, 11_008, 32, 32, None, 2048),
    "mistral": _text_model("MistralForCausalLM", 32_000, 4096, 14_336, 32, 32, 8, 131_072),
    "qwen2": _text_model("Qwen2ForCausalLM", 151_936, 4096, 22_016, 32, 32, 32, 32_768),
    "gemma3_text": _text_model(
        "Gemma3ForCausalLM", 262_208, 2304, 9216, 26, 8, 4, 131_072,
        head_dim=256, tie_word_embeddings=True,
    ),
    "qwen2_5_vl_text": _text_model(
        "Qwen2ForCausalLM", 152_064, 8192, 29_568, 80, 64, 8, 32_768,
        rms_norm_eps=1e-5, rope_theta=1_000_000.0, max_window_layers=80,
    ),
    "qwen3_vl_text": _text_model(
        "Qwen3ForCausalLM", 151_936, 4096, 22_016, 32, 32, 32, 128_000,
        head_dim=128, rope_theta=500_000.0,
    ),
}  # fmt: skip
"""Configs of text models alone, by `model_type` of a text_config, with the values of transformers
for settings that it leaves out.
"""


def text_config(config: Mapping[str, Any], stored: Collection[str] = ()) -> dict[str, Any]:
    """The text model's config of a served composite checkpoint; of any other one, the config.

    stored: names of the checkpoint's tensors, as by `text_name`. A head among them is not tied,
    whatever the config says, as in transformers.
    """
    name, text = composite_class(config), config.get("text_config")
    if name == "Qwen2_5_VLForConditionalGeneration" and text is None:
        # Releases of transformers before 4.52 wrote no text_config.
        text = {key: value for key, value in config.items() if key not in _NOT_OF_TEXT}
    if name is None or not isinstance(text, Mapping):
        return dict(config)
    defaults = _DEFAULTS.get(str(text.get("model_type") or COMPOSITES[name].text_type))
    if defaults is None:
        return dict(config)
    said = [part[_TIED] for part in (config, text) if part.get(_TIED) is not None]
    is_tied = any(said) if said else defaults[_TIED]
    return {
        **defaults,
        **{key: _plain_rope(value) for key, value in text.items()},
        **{key: config[key] for key in _OF_THE_WHOLE if config.get(key) is not None},
        _TIED: is_tied and _HEAD not in stored,
        "architectures": defaults["architectures"],
        "model_type": defaults["model_type"],
    }


def _plain_rope(setting: Any) -> Any:
    """A setting, with the type "mrope" of a rope replaced by "default".

    A token of text has one position in all of the three dimensions that mrope has for images.
    """
    if isinstance(setting, Mapping) and setting.get("rope_type", setting.get("type")) == "mrope":
        return {**setting, "rope_type": "default"}
    return setting
