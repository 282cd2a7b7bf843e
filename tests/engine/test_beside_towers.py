"""Text models of checkpoints that also take images, and adapters that were trained on the whole
class, say what transformers and PEFT say.
"""

import pytest

from tests.engine.fakes import make_message, run_until_idle, tokens_of
from tests.engine.real_core import add_adapter, build_core
from tests.oracle import greedy, merged_model
from tests.tiny_models import GEMMA3, MROPE, NEWER_NAMES, rename_tensors, save_adapter, save_model

OF_TEXT = r".*language_model.*\.(q_proj|v_proj|o_proj|gate_proj|down_proj)"
PROMPTS = ([5, 17, 18, 19, 7, 9], list(range(30, 70)))
NUM_TOKENS = 8


@pytest.mark.parametrize(
    ("family", "options", "names", "task"),
    [
        ("gemma3", GEMMA3, {}, "CAUSAL_LM"),
        ("gemma3", GEMMA3, NEWER_NAMES, None),
        ("mistral3", {"sliding_window": 24}, {}, None),
        ("qwen2_5_vl", {"tied": False, "rope": MROPE}, {}, "CAUSAL_LM"),
        ("qwen3_vl", {"tied": False, "rope": MROPE}, {}, None),
        ("llava", {"tied": False}, NEWER_NAMES, "CAUSAL_LM"),
    ],
)
def test_an_adapter_of_the_whole_class_says_what_the_merged_model_says(
    tmp_path, family, options, names, task
):
    model_dir = save_model(tmp_path / "model", family=family, **options)
    rename_tensors(model_dir, names)
    folder = save_adapter(
        model_dir, tmp_path / "adapter", seed=1, target_modules=OF_TEXT, task_type=task
    )
    objects = {}
    adapter = add_adapter(objects, model_dir, folder, tmp_path)
    core = build_core(model_dir, tmp_path / "engine", objects)
    asked = {"base": None, "adapter": adapter}
    said = {}
    for name, ref in asked.items():
        said[name] = [answer(core, f"{name}-{i}", p, ref) for i, p in enumerate(PROMPTS)]
    assert said["base"] == expected(model_dir, None)
    assert said["adapter"] == expected(model_dir, folder)
    assert said["base"] != said["adapter"]


def answer(core, request_id, prompt, adapter):
    core.handle(
        "gw", make_message(request_id, prompt=prompt, max_tokens=NUM_TOKENS, adapter=adapter)
    )
    return tokens_of(run_until_idle(core)[request_id])


def expected(model_dir, adapter_dir):
    model = merged_model(model_dir, adapter_dir)
    return [greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
