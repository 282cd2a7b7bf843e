"""`chorale plan`: its flags, its errors, and a measurement of this machine."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from server.cli.main import app

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
SMALL = ("--prompt-tokens", "16:48", "--output-tokens", "4", "--users", "2")


def plan(*flags: str) -> Result:
    return CliRunner().invoke(app, ["plan", *flags])


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((), "Name a model by --model"),
        (("--model", "no-such"), "--model: no-such is no folder with a config.json"),
        (("--model", "llama-3-8b", "--sizes", "wings=2"), "--sizes: 'wings=2' is no size"),
        (("--sizes", "layers=2"), "--sizes: without a model, give hidden"),
        (("--model", "llama-3-8b", "--hardware", "abacus"), "--hardware 'abacus' is none of"),
        (("--model", "llama-3-8b", "--quantization", "int2"), "--quantization 'int2' is none of"),
        (("--model", "llama-3-8b", "--popularity", "odd"), "--popularity 'odd' is none of"),
        (("--model", "llama-3-8b", "--prompt-tokens", "9:1"), "--prompt-tokens '9:1'"),
        (("--model", "llama-3-8b", "--output-tokens", "x"), "--output-tokens 'x'"),
        (("--model", "llama-3-8b", "--prompt-tokens", "9000"), "llama-3-8b was made for 8192"),
        (("--model", "llama-3-8b", "--users", "1", "--rate", "1"), "--users or --rate, not both"),
        (("--model", "llama-3-8b", "--users", "1.5"), "--users '1.5': give whole numbers"),
        (("--model", "llama-3-8b", "--rate", "-1"), "--rate '-1': give positive numbers"),
        (("--model", "llama-3-8b", "--rate", "nan"), "--rate 'nan': give positive numbers"),
        (("--model", "llama-3-8b", "--ranks", "300"), "--ranks '300': give whole numbers of 1"),
        (("--model", "llama-3-8b", "--utilization", "2"), "--utilization 2.0 is no share"),
        (("--model", "llama-3-8b", "--tensor-parallel-size", "3"), "take one of 1, 2, 4, 8"),
        (
            ("--model", "llama-3-8b", "--hardware", "epyc-9r14", "--tensor-parallel-size", "2"),
            "--tensor-parallel-size 2: ranks on a CPU share its bandwidth",
        ),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_named_in_one_line(flags: tuple[str, ...], told: str) -> None:
    result = plan(*flags)
    assert result.exit_code == 2
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_folder_is_planned_and_json_has_all_figures(folder: str) -> None:
    result = plan("--model", folder, *SMALL, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["model"]["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert told["model"]["kv_bytes_per_token_without_gqa"] == 2 * 2 * 4 * 16 * 2
    assert told["engine"]["engines"] == 1
    assert [answer["users"] for answer in told["one_engine"]] == [2]
    forms = [fleet["quantization"] for fleet in told["costs"]["by_quantization"]]
    assert forms == ["float", "int8", "int4"]
    assert told["breaks_first"]["change"]


def test_a_mixture_of_experts_is_planned_and_a_stored_form_is_kept(tmp_path: Path) -> None:
    experts = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | experts))
    for hardware in ("epyc-9r14", "h100-80gb"):
        assert plan("--model", str(tmp_path), *SMALL, "--hardware", hardware).exit_code == 0
    stored = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | stored))
    told = json.loads(plan("--model", str(tmp_path), *SMALL, "--json").stdout)
    assert told["model"]["quantization"] == "awq"


def test_a_price_of_ones_own_is_the_price_of_a_device(folder: str) -> None:
    prices = [
        json.loads(plan("--model", folder, *SMALL, "--usd-per-hour", usd, "--json").stdout)
        for usd in ("1", "3")
    ]
    one, three = (told["engine"]["usd_per_million_output_tokens"] for told in prices)
    assert three == pytest.approx(3 * one, rel=0.01)


def test_this_machine_is_measured_by_a_child_process(folder: str) -> None:
    result = plan("--model", folder, *SMALL, "--measure", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["hardware"]["name"] == "this machine"
    assert told["hardware"]["share_of_bytes_per_s"] is None
    assert told["hardware"]["bytes_per_s"] > 1e8
    assert told["hardware"]["flops_per_s"] > 1e7
    assert told["one_engine"][0]["tpot_ms_p50"] > 0
