"""Names of quantised weights in the configs of adapters, and of the weights that they come from."""

import pytest

from registry.base.base_names import last_name, plain_name, trained_on_quantised

QUANTISED = {
    "unsloth/llama-3-8b-bnb-4bit": "llama-3-8b",
    "unsloth/Llama-3.2-1B-Instruct-unsloth-bnb-4bit": "llama-3.2-1b-instruct",
    "mlx-community/Qwen3-4B-4bit": "qwen3-4b",
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": "qwen2.5-7b-instruct",
    "TheBloke/Mistral-7B-v0.1-AWQ": "mistral-7b-v0.1",
    "RedHatAI/Llama-3.1-8B-Instruct-FP8-dynamic": "llama-3.1-8b-instruct",
    "neuralmagic/Llama-3.2-1B-Instruct-quantized.w8a8": "llama-3.2-1b-instruct",
    "/root/.cache/huggingface/hub/models--unsloth--gemma-3-4b-it-bnb-4bit/snapshots/0a1b": (
        "gemma-3-4b-it"
    ),
    "C:\\models\\llama-3-8b-int8\\": "llama-3-8b",
}
WHOLE = {
    "meta-llama/Llama-3.2-1B-Instruct": "llama-3.2-1b-instruct",
    "microsoft/phi-4": "phi-4",
    "unsloth/my-unsloth": "my-unsloth",
    "org/small-dynamic": "small-dynamic",
    "4bit": "4bit",
    "/data/hub/models--gpt2/snapshots/0a1b/": "gpt2",
    "": "",
}


@pytest.mark.parametrize(("trained_on", "plain"), [*QUANTISED.items(), *WHOLE.items()])
def test_a_plain_name_has_no_words_of_a_quantised_format(trained_on, plain):
    assert plain_name(trained_on) == plain
    assert trained_on_quantised(trained_on) == (trained_on in QUANTISED)


def test_the_last_name_is_as_it_is_written_in_lower_case():
    assert last_name("unsloth/Llama-3-8B-bnb-4bit/") == "llama-3-8b-bnb-4bit"
