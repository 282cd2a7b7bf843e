"""GPTQ's weights are nearer in what they are for, and the engine reads them from our files."""

import json

import pytest
import torch
from transformers import LlamaForCausalLM

from bench.checkpoint import make_checkpoint
from bench.peers.rows import write_rows
from bench.quantization.__main__ import FORMS, parse_options, run
from bench.quantization.gptq import quantize_gptq, rounded_projections
from bench.quantization.gptq_file import write_gptq
from bench.quantization.text import paragraphs
from engine.weights import open_weights
from kernels.quantized import Rounding, quantize

SIZE = 32


def make_inputs(rows, width):
    """Inputs that depend on each other, as those of a layer do."""
    rng = torch.Generator().manual_seed(0)
    return torch.randn(rows, 7, generator=rng) @ torch.randn(7, width, generator=rng)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_checkpoint("tiny", tmp_path_factory.mktemp("bench"), num_adapters=0).model_dir


def make_rounded(model_dir, rows=5):
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    token_ids = torch.randint(320, (rows, 33), generator=torch.Generator().manual_seed(0))
    return model, dict(rounded_projections(model, token_ids, SIZE))


def test_products_of_inputs_that_depend_on_each_other_lose_less_than_by_the_nearest_codes():
    weight = torch.randn(63, 96, generator=torch.Generator().manual_seed(1))
    x = make_inputs(133, 96)
    nearest = quantize(weight, Rounding(4, SIZE))
    found = quantize_gptq(weight, x.T @ x, SIZE)
    lost = [(x @ (w.dequantize() - weight).T).norm().item() for w in (found, nearest)]
    assert lost[0] < 0.3 * lost[1]
    assert found.codes.min() >= -8
    assert found.codes.max() <= 7


def test_inputs_that_have_nothing_in_common_are_rounded_to_the_nearest_codes():
    weight = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))
    found = quantize_gptq(weight, torch.eye(64), SIZE)
    scales = found.scales.repeat_interleave(SIZE, dim=1)
    assert torch.equal(found.codes, (weight / scales).round().clamp(-8, 7).to(torch.int8))


def test_every_projection_is_rounded_and_the_model_computes_with_what_it_became(model_dir):
    model, weights = make_rounded(model_dir)
    modules = {n: m for n, m in model.named_modules() if n.endswith("_proj")}
    assert weights.keys() == modules.keys()
    for name, module in modules.items():
        assert torch.equal(module.weight, weights[name].dequantize())


def test_the_first_layer_is_rounded_for_the_inputs_that_transformers_gives_it(model_dir):
    exact = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    _, weights = make_rounded(model_dir)
    name = "model.layers.0.mlp.down_proj"
    module, seen = exact.get_submodule(name), []
    module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, 1)))
    token_ids = torch.randint(320, (5, 33), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        exact(input_ids=token_ids)
        expected = quantize_gptq(module.weight, seen[0].T @ seen[0], SIZE)
    same = (weights[name].codes == expected.codes).float().mean()
    assert same > 0.99


def test_the_engine_reads_from_the_file_what_was_written(model_dir, tmp_path):
    _, weights = make_rounded(model_dir)
    write_gptq(model_dir, tmp_path / "gptq", weights)
    stored = open_weights(tmp_path / "gptq", torch.float32)
    for name, weight in weights.items():
        found = stored[f"{name}.weight"]
        assert found.rounding == Rounding(4, SIZE)
        assert torch.equal(found.dequantize(), weight.dequantize())


def test_no_paragraph_is_both_held_out_and_for_calibration():
    held_out, others = (list(paragraphs(part)) for part in (True, False))
    assert held_out
    assert others
    assert not set(held_out) & set(others)


def test_rows_compare_every_form_with_float32_on_the_same_tokens(tmp_path):
    few = ["--rows", "3", "--row-tokens", "33", "--calibration-rows", "3"]
    options = parse_options(["--stack", "tiny", *few])
    assert write_rows(run(options), tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["setup"]["form"] for row in rows] == list(FORMS)
    results = {row["setup"]["form"]: row["result"] for row in rows}
    assert {row["setup"]["tokens"] for row in rows} == {3 * 32}
    assert results["float32"]["greedy_agreement"] == results["float32"]["loss_to_float32"] == 1.0
    assert all(0 < result["loss"] < 30 for result in results.values())
    assert results["gptq"]["loss"] != results["int4"]["loss"] != results["float32"]["loss"]
