"""Random trained rows of the ends beside LoRA: the weights that are served are those of PEFT."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from registry.formats.peft_format import EMBEDDING
from tests.corpus.test_peft_loader import FUZZ, Tiny
from tests.corpus.world import randomize

# PEFT warns that tied weights are saved or merged twice.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:peft.*")

_ENDS = st.sampled_from(([], ["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]))
_ids = st.lists(st.integers(0, 291), min_size=1, max_size=4, unique=True)
_configs = st.fixed_dictionaries(
    {
        "r": st.sampled_from((1, 3)),
        "lora_alpha": st.sampled_from((2, 5)),
        "use_rslora": st.booleans(),
        "target_modules": _ENDS.map(lambda ends: ["q_proj", "up_proj", *ends]),
        # PEFT has no LoRA on what is saved whole.
        "modules_to_save": st.none() | _ENDS,
        "trainable_token_indices": st.none()
        | _ids
        | st.dictionaries(st.sampled_from(("lm_head", "embed_tokens")), _ids, min_size=1),
        "ensure_weight_tying": st.booleans(),
    }
)


class TrainedRows(Tiny):
    """The smallest model of one layer, of whose ends PEFT trains some rows."""

    def fresh_model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder / "model", dtype=torch.float32)

    def train(self, options: dict[str, Any], rows: list[int]) -> Path:
        """Save an adapter of which LoRA was trained, and these rows of what is saved whole: modules
        in modules_to_save, and ends below LoRA.
        """
        config = LoraConfig(task_type="CAUSAL_LM", **deepcopy(options))
        try:
            model = get_peft_model(self.fresh_model(), config)
        except (KeyError, TypeError, ValueError):  # PEFT has no such combination
            assume(False)
        torch.manual_seed(0)
        randomize(model)
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name or re.search(r"(lm_head|embed_tokens)\.base_layer", name):
                parameter.data[rows] += torch.randn(len(rows), parameter.shape[1])
        folder = self.new_folder()
        try:
            model.save_pretrained(folder)
        except ValueError:
            assume(False)
        return folder

    def served_model(self, folder: Path) -> Any:
        """The model with the weights that are served of an adapter."""
        model = self.fresh_model()
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        for name, (a, b, scale) in self.served(folder).items():
            update = scale * (b.float() @ a.float())
            model.get_submodule(name).weight.data += update.T if name == EMBEDDING else update
        return model


@pytest.fixture(scope="module")
def tiny_of(tmp_path_factory):
    return {
        tied: TrainedRows(tmp_path_factory.mktemp("rows"), tied=tied, num_hidden_layers=1)
        for tied in (True, False)
    }


@settings(FUZZ, max_examples=80)
@given(is_tied=st.booleans(), options=_configs, rows=_ids)
@torch.inference_mode()
def test_rows_that_were_trained_beside_lora_are_served_as_peft_loads_them(
    tiny_of, is_tied, options, rows
):
    tiny = tiny_of[is_tied]
    folder = tiny.train(options, rows)
    prompt = torch.tensor([[5, 17, *rows, 291, 0, 33]])
    try:
        expected = PeftModel.from_pretrained(tiny.fresh_model(), folder).eval()(prompt).logits
    except (KeyError, ValueError):  # PEFT does not load what it saved
        assume(False)
    logits = tiny.served_model(folder)(prompt).logits
    # A row is stored as a difference in float32, so a few of its bits are lost.
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
