"""Names of a text model's tensors, whatever else the checkpoint takes."""

import pytest

from registry.formats.architecture import text_name

LAYER = "layers.3.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("name", "own"),
    [
        (f"model.{LAYER}", f"model.{LAYER}"),
        (f"model.language_model.{LAYER}", f"model.{LAYER}"),
        (f"language_model.model.{LAYER}", f"model.{LAYER}"),
        (f"language_model.{LAYER}", f"model.{LAYER}"),
        (f"text_model.{LAYER}", f"model.{LAYER}"),
        (f"text_model.model.{LAYER}", f"model.{LAYER}"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight", None),
        ("model.visual.blocks.0.attn.qkv.weight", None),
        ("model.audio_tower.layers.0.self_attn.q_proj.weight", None),
        ("model.multi_modal_projector.linear_1.weight", None),
    ],
)
def test_text_tensors_have_one_name_and_those_of_towers_have_none(
    name: str, own: str | None
) -> None:
    assert text_name(name) == own
