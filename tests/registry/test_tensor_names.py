"""The table of names: what each writer calls a tensor, and PEFT's name for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.checks.tensor_names import name_tensors, peft_name
from registry.formats.peft_format import Header, TensorInfo, lora_names

Q0 = "layers.0.self_attn.q_proj"
A0, B0 = lora_names(f"model.{Q0}")
EMBEDDING_A, _ = lora_names("model.embed_tokens")
HEAD_A, _ = lora_names("lm_head")
HEAD = "base_model.model.lm_head"
SAVED = f"{HEAD}.modules_to_save.weight"
EMBEDDING = "base_model.model.model.embed_tokens"


@pytest.mark.parametrize(
    ("writer", "given", "name"),
    [
        ("PEFT's state dict", f"{EMBEDDING}.lora_embedding_A.sales", EMBEDDING_A),
        ("PEFT of an adapter called lora", f"base_model.model.model.{Q0}_A.weight", A0),
        ("PEFT of an adapter called lora", f"{EMBEDDING}_embedding_A", EMBEDDING_A),
        ("transformers' AutoModel", "base_model.model.embed_tokens.lora_embedding_A", EMBEDDING_A),
        (
            "Axolotl, FSDP",
            "_fsdp_wrapped_module.base_model.model.model.layers.0._fsdp_wrapped_module."
            "_checkpoint_wrapped_module.self_attn.q_proj.lora_A.default.weight",
            A0,
        ),
        ("DDP", f"module.base_model.model.model.{Q0}.lora_A.weight", A0),
        ("PEFT, a text_model", f"base_model.model.model.text_model.{Q0}.lora_A.weight", A0),
        ("PEFT, Mistral 3", "base_model.model.language_model.lm_head.lora_A.weight", HEAD_A),
        ("PEFT, modules_to_save", f"{HEAD}.modules_to_save.default.weight", SAVED),
        ("PEFT, embedding", f"{EMBEDDING}.base_layer.weight", f"{EMBEDDING}.base_layer.weight"),
        (
            "PEFT, trained tokens",
            f"{EMBEDDING}.token_adapter.trainable_tokens_delta.default",
            f"{EMBEDDING}.token_adapter.trainable_tokens_delta",
        ),
        ("a tower", f"base_model.model.model.vision_tower.encoder.{Q0}.lora_A.weight", None),
    ],
)
def test_each_writers_name_has_one_of_peft(writer, given, name):
    assert peft_name(given) == name, writer


@pytest.mark.parametrize(
    "name", [A0, B0, EMBEDDING_A, HEAD_A, f"{HEAD}.weight", SAVED, f"{HEAD}.original_module.weight"]
)
def test_a_name_of_peft_stays(name):
    assert peft_name(name) == name


PREFIXES = ("", "base_model.model.", "module.", "_orig_mod.", "base_model.model._orig_mod.")
MODELS = ("", "model.", "model.language_model.", "language_model.model.", "text_model.")
ADAPTERS = ("", ".default", ".sales-v2", ".A")


@given(*(st.sampled_from(parts) for parts in (PREFIXES, MODELS, ADAPTERS, ("A", "B"))))
def test_parts_of_names_combine(prefix, model, adapter, side):
    name = f"{prefix}{model}{Q0}.lora_{side}{adapter}.weight"
    assert peft_name(name) == (A0 if side == "A" else B0)


@given(st.text(max_size=60))
def test_any_other_text_has_a_name_that_is_refused_later(text):
    assert (name := peft_name(text)) is None or name.startswith("base_model.model.")


@pytest.mark.parametrize("prefix", ["model.", "", "language_model.model."])
def test_the_trainers_name_of_a_module_is_known_by_its_layers(prefix):
    info = TensorInfo("F32", (4, 4), 0, 64)
    names = (f"{prefix}{Q0}.lora_A.weight", f"{prefix}{Q0}.lora_B.weight")
    uploaded = name_tensors(Header(dict.fromkeys(names, info), {}))
    assert uploaded.trained_name(f"model.{Q0}") == f"{prefix}{Q0}"
    assert uploaded.trained_name("model.embed_tokens") == f"{prefix}embed_tokens"
    assert uploaded.trained_name("lm_head") == "lm_head"
