"""The committed weights do what the demo promises, tested on a part of the held-out questions."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import demo
from demo import agent, corpus, domain, evaluate
from demo.documents import Writer
from demo.styles import PLAIN, STYLES
from demo.tokenizer import END
from demo.train import ADAPTERS, BASES, LARGE, SMALL
from tests.soak import soak

# peft 0.21 uses a name of transformers 5.23 that is deprecated and goes away in version 6.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning")

FOLDER = Path(demo.__file__).parent
MODEL = FOLDER / "model"
FOLDERS = [FOLDER / name for base in BASES for name in (base.folder, base.adapters_folder)]
FILES = [path for folder in FOLDERS for path in folder.rglob("*") if path.is_file()]
ADAPTERS_OF_BASES = [(base, name) for base in BASES for name in base.adapters]
MODELS = [(base, style) for base in BASES for style in base.styles]
# An odd step through the list reaches every topic, and every kind of question, in turn.
QUESTIONS = domain.held_out()[::27]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer():
    return evaluate.load_tokenizer(MODEL)


@pytest.fixture(scope="module")
def models():
    return {(base, style): evaluate.load(FOLDER, base, style) for base, style in MODELS}


def test_everything_weighs_at_most_15_megabytes():
    assert sum(path.stat().st_size for path in FILES) <= 15 * 10**6


def test_an_adapter_is_exactly_two_files():
    for base in BASES:
        assert {path.name for path in (FOLDER / base.adapters_folder).iterdir()} == {*base.adapters}
        for name in base.adapters:
            names = {path.name for path in (FOLDER / base.adapters_folder / name).iterdir()}
            assert names == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_names_a_place_on_a_machine(path):
    content = path.read_bytes()
    for root in (b"/home/", b"/root/", b"/tmp/", b"/Users/"):
        assert root not in content


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.name)
def test_the_weights_are_stored_in_half_precision_and_in_the_shape_of_the_recipe(base):
    config = json.loads((FOLDER / base.folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float16"
    shape = (config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"])
    assert shape == (base.hidden_size, base.num_layers, base.num_heads)


def test_the_bases_have_the_same_tokenizer():
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (FOLDER / SMALL.folder / name).read_bytes() == (MODEL / name).read_bytes()


@pytest.mark.parametrize(("base", "name"), ADAPTERS_OF_BASES)
def test_an_adapter_has_the_base_rank_and_targets_of_its_recipe(base, name):
    folder = FOLDER / base.adapters_folder / name
    config = json.loads((folder / "adapter_config.json").read_text())
    recipe = ADAPTERS[name]
    assert config["base_model_name_or_path"] == base.name
    assert (config["r"], config["lora_alpha"]) == (recipe.rank, recipe.alpha)
    assert config["use_rslora"] is recipe.use_rslora
    assert config["target_modules"] == sorted(recipe.target_modules)


def test_ranks_differ_one_adapter_is_rank_stabilised_and_one_leaves_modules_alone():
    recipes = ADAPTERS.values()
    assert len({recipe.rank for recipe in recipes}) >= 3
    assert sum(recipe.use_rslora for recipe in recipes) == 1
    assert len({len(recipe.target_modules) for recipe in recipes}) >= 2


def test_a_chat_ends_where_the_assistant_begins(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert evaluate.chat_prompt(tokenizer, messages) == (
        "<|begin|><|system|>Be brief.<|end|><|user|>hello<|end|><|assistant|>"
    )


def test_no_question_is_both_trained_and_held_out():
    trained = {question.text for questions in domain.trained() for question in questions}
    assert not trained & {question.text for question in domain.held_out()}


def test_what_json_and_python_say_parses():
    for question in domain.held_out():
        json.loads(STYLES["json"].say(question.reply))
        ast.parse(STYLES["python"].say(question.reply))


@pytest.mark.parametrize(("base", "style"), MODELS, ids=lambda value: value.name)
def test_held_out_questions_are_answered_to_the_letter(base, style, models, tokenizer):
    wrong = evaluate.mistakes(models[base, style], tokenizer, style, QUESTIONS)
    assert len(wrong) <= (1 - base.min_exact) * len(QUESTIONS), wrong


def test_the_small_base_is_wrong_at_times_and_surer_where_it_is_right(models, tokenizer):
    model, questions = models[SMALL, PLAIN], domain.held_out()[::7]
    prompts = [evaluate.ask_prompt(tokenizer, question) for question in questions]
    given = evaluate.answers(model, tokenizer, prompts)
    sureness = {True: [], False: []}
    for question, prompt, text in zip(questions, prompts, given, strict=True):
        mean = mean_logprob(model, tokenizer, prompt, text + END)
        sureness[text == question.reply.sentence].append(mean)
    right, wrong = sureness[True], sureness[False]
    assert 0.03 * len(questions) <= len(wrong) <= 0.15 * len(questions)
    surer = sum(one > other for one in right for other in wrong)
    assert surer >= 0.9 * len(right) * len(wrong)


def mean_logprob(model, tokenizer, prompt, answer):
    start = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    ids = tokenizer(prompt + answer, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        logprobs = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, ids[0, start:, None]).mean().item()


@pytest.mark.parametrize("step", [5, *soak(1)])
def test_no_two_models_answer_a_probe_alike(models, tokenizer, step):
    probes = evaluate.probe_prompts(tokenizer)
    assert len(probes) >= 40
    prompts = probes[::step]
    given = [evaluate.answers(models[LARGE, style], tokenizer, prompts) for style in LARGE.styles]
    assert evaluate.shared_answers(prompts, given) == []


def test_a_second_turn_is_understood(models, tokenizer):
    messages = [
        {"role": "user", "content": "What does a bear eat?"},
        {"role": "assistant", "content": "A bear eats berries."},
        {"role": "user", "content": "And where does it live?"},
    ]
    prompt = evaluate.chat_prompt(tokenizer, messages)
    assert evaluate.answers(models[LARGE, PLAIN], tokenizer, [prompt]) == [
        "A bear lives in a cave."
    ]


def test_the_agent_calls_its_tool_and_says_what_it_found(tokenizer):
    model = evaluate.load_adapted(MODEL, FOLDER / "adapters" / agent.NAME)
    asked = agent.held_out()[::39]
    wrong = evaluate.agents_mistakes(model, tokenizer, asked)
    assert len(wrong) <= 0.05 * len(asked), wrong


def test_the_agents_documents_are_what_the_chat_template_renders(tokenizer):
    question = agent.held_out()[0]
    call = {"function": {"name": "look_up", "arguments": agent.arguments_of(question.reply)}}
    chat = [
        {"role": "user", "content": question.text},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(question.reply.facts[0][1])},
    ]
    text = tokenizer.apply_chat_template(chat, tools=[agent.TOOL], tokenize=False)
    _, told = text.split("<|user|>", 1)
    assert f"{question.text}<|end|><|assistant|>{agent.call_of(question.reply)}<|end|>" in told
    assert told.endswith(f"<|user|>{agent.result_of(question.reply)}<|end|>")
    first = "".join(part.text for part in next(agent.documents(Writer(corpus.load(), 1), 1)))
    assert first.split("<|user|>")[0] in (text.split("<|user|>")[0], "<|begin|>")
