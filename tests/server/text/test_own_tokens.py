"""A base model's tokenizer with an adapter's tokens, against transformers on its folder."""

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from registry.errors import Invalid
from registry.formats.own_tokenizer import TOKENIZER, TOKENIZER_FILES, BaseText, find_own
from server.text.template_process import TemplateProcess
from server.text.tokenizer import Detokenizer, Tokenizer
from tests.tokenizer_families import FAMILIES, make_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BASES = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOKENS = [
    AddedToken("<tool>", normalized=False), AddedToken("<tool>x", normalized=False),
    AddedToken("Größe"), AddedToken("é"), AddedToken("<a", normalized=False),
    AddedToken("lone", single_word=True, normalized=False),
]  # fmt: skip
STRIPPING = [AddedToken("<l>", lstrip=True), AddedToken("<r>", rstrip=True, special=True)]
PIECES = st.sampled_from(
    ["<tool>", "<tool>x", "Größe", "Gro\u0308\u00dfe", "é", "e\u0301", "<a", "<", "a", " ", "\n",
     "lone", "alone", "<l>", "<r>", "<|im_start|>", "<|im_end|>", "</s>", "<s>", "<|eot_id|>",
     "<think>", "[INST]", "🙂", "1234", "\u2581"]
)  # fmt: skip
texts = st.lists(PIECES | st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=9)


class World:
    """A base model's tokenizer, and an adapter's of which the base model's is a part."""

    def __init__(self, family, folder, tokens):
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=make_tokenizer(family), chat_template=BASES, **SPECIAL
        )
        tokenizer.save_pretrained(folder / "base")
        tokenizer.add_special_tokens(
            {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
        )
        tokenizer.add_tokens(tokens)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder / "own")
        files = {
            name: folder / "own" / name
            for name in TOKENIZER_FILES
            if (folder / "own" / name).exists()
        }
        self.own = find_own(files, BaseText(folder / "base" / TOKENIZER, BASES, SPECIAL), 5000)
        self.base = Tokenizer(folder / "base")
        self.before = self.base.encode("<tool>x <|im_end|> Größe")
        self.ours = self.base.with_own(self.own, TemplateProcess())
        self.oracle = AutoTokenizer.from_pretrained(folder / "own")


@pytest.fixture(scope="module", params=[(f, s) for f in FAMILIES for s in ("plain", "stripping")])
def world(request, tmp_path_factory):
    family, kind = request.param
    tokens = TOKENS + STRIPPING * (kind == "stripping")
    return World(family, tmp_path_factory.mktemp("world"), tokens)


def test_ids_are_those_of_transformers_on_the_adapters_folder(world):
    @settings(max_examples=150, deadline=None)
    @given(texts.map("".join), st.booleans())
    def check(text, special):
        expected = world.oracle(text, add_special_tokens=special).input_ids
        assert world.ours.encode(text, add_special_tokens=special) == expected
        assert world.ours.least_tokens(text) <= max(len(expected), world.ours.least_tokens(""))

    check()
    assert world.base.encode("<tool>x <|im_end|> Größe") == world.before, "the base has no part"


def test_a_text_of_long_added_tokens_is_not_taken_for_longer_than_it_is(tmp_path):
    long = "<" + "é" * 60 + ">"
    world = World("qwen2", tmp_path, [AddedToken(long, normalized=False)])
    ids = world.ours.encode(long * 99, add_special_tokens=False)
    assert len(ids) == 99
    assert world.ours.least_tokens(long * 99) <= 99 < world.base.least_tokens(long * 99)


def test_added_tokens_are_shown_and_ends_of_answers_are_not(world):
    hello = world.base.encode("Hello", add_special_tokens=False)
    ids = world.oracle.convert_tokens_to_ids(["<tool>", "<a", "<|im_end|>"])
    said = Detokenizer(world.ours.vocabulary).push([*hello, *ids], final=True)
    assert said.strip() == world.oracle.decode([*hello, *ids], skip_special_tokens=True).strip()
    assert said.endswith("Hello<tool><a")
    assert world.ours.decode(ids) == "<tool><a<|im_end|>"
    assert world.ours.token_text(ids[0]) == "<tool>"
    for name in ("<tool>", "<|im_end|>"):
        assert world.ours.added_tokens[name] == world.oracle.convert_tokens_to_ids(name)
    assert world.oracle.eos_token_id in world.ours.eos_token_ids
    assert set(world.base.eos_token_ids) < set(world.ours.eos_token_ids)
    assert len(world.ours.vocabulary) == len(world.oracle)
    first = len(world.base.vocabulary)
    assert list(world.ours.vocabulary)[:first] == list(world.base.vocabulary)


def test_a_chat_is_rendered_as_transformers_renders_it(world):
    chat = [{"role": "user", "content": "Hé <tool>"}, {"role": "assistant", "content": "Yes"}]
    ids = world.oracle.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    text = world.ours.chat_template.render(chat)
    assert world.ours.encode(text, add_special_tokens=False) == ids
    assert world.ours.chat_template.description["eos_token"] == "<|im_end|>"
    assert world.ours.is_confined


def test_the_base_models_template_has_the_adapters_end_of_answers(tmp_path):
    world = World("llama3", tmp_path, [])
    own = {name: value for name, value in world.own.items() if name != "chat_template"}
    ours = world.base.with_own(own, TemplateProcess())
    assert ours.chat_template.render([{"role": "user", "content": "Hi"}]) == "Hi<|im_end|>"
    assert world.base.chat_template.render([{"role": "user", "content": "Hi"}]) == "Hi</s>"
    assert not ours.is_confined


def test_a_tokenizer_that_was_compared_with_another_is_refused(tmp_path):
    own = World("llama3", tmp_path, []).own
    make_tokenizer("mistral").save(str(tmp_path / TOKENIZER))
    with pytest.raises(Invalid, match="upload the adapter again"):
        Tokenizer(tmp_path).with_own(own, TemplateProcess())


def test_only_what_is_its_own_takes_memory(tmp_path):
    """The vocabulary of a large model takes 100 MB, and there are hundreds of adapters."""
    world = World("qwen2", tmp_path, TOKENS)
    process = TemplateProcess()
    world.base.with_own(world.own, process)
    tracemalloc.start()
    try:
        kept = [world.base.with_own(world.own, process) for _ in range(10)]
        size_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size_bytes / len(kept) < len(world.base.vocabulary) * 8, "not even a list of its tokens"
    assert all(each._hf.model is not None for each in kept)
