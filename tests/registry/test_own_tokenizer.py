"""Tokens and templates of an adapter's own, with transformers' saved folders as oracle."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from registry.errors import InvalidAdapter, TooLarge
from registry.formats import own_tokenizer
from registry.formats.own_tokenizer import (
    CHAT_TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    BaseText,
    find_own,
)
from tests.refusals import refused
from tests.tokenizer_families import FAMILIES, make_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BASES = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(params=FAMILIES)
def base(request, tmp_path):
    """A base model's folder, as transformers saves it, and its tokenizer."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(request.param), chat_template=BASES, **SPECIAL
    )
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base", AutoTokenizer.from_pretrained(tmp_path / "base")


def own_of(folder: Path, base_folder: Path, num_ids: int = 4096):
    files = {name: folder / name for name in TOKENIZER_FILES if (folder / name).exists()}
    of_base = BaseText(base_folder / TOKENIZER, BASES, SPECIAL)
    return find_own(files, of_base, num_ids)


def saved(tokenizer, folder: Path) -> Path:
    tokenizer.save_pretrained(folder)
    return folder


def changed(folder: Path, change) -> Path:
    """The folder, with a changed tokenizer.json."""
    parts = json.loads((folder / TOKENIZER).read_text())
    change(parts)
    (folder / TOKENIZER).write_text(json.dumps(parts))
    return folder


# ---- what is added ----


def test_a_tokenizer_that_is_the_base_models_has_nothing_of_its_own(base, tmp_path):
    folder, tokenizer = base
    tokenizer.pad_token = tokenizer.eos_token
    assert own_of(saved(tokenizer, tmp_path / "own"), folder) is None
    assert own_of(folder, folder) is None
    assert own_of(tmp_path, folder) is None


def test_the_chat_format_that_trainers_set_up_is_found_whole(base, tmp_path):
    """TRL's `setup_chat_format`: two tokens, one of which ends answers, and a template."""
    folder, tokenizer = base
    tokenizer.add_special_tokens(
        {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
        | {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    )
    tokenizer.chat_template = CHATML
    own = own_of(saved(tokenizer, tmp_path / "own"), folder)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "own")
    assert own["chat_template"] == CHATML
    assert own["eos_token_ids"] == [loaded.eos_token_id]
    assert own["special_tokens"] == {"eos_token": "<|im_end|>"}, "the template names no other"
    added = {token["content"]: token["id"] for token in own.get("added_tokens", [])}
    known = AutoTokenizer.from_pretrained(folder).get_vocab()
    assert added == {name: i for name, i in loaded.get_vocab().items() if name not in known}
    assert own_tokenizer.summary(own) == {
        "added_tokens": len(added), "has_chat_template": True,
        "eos_token_ids": [loaded.eos_token_id],
    }  # fmt: skip


def test_added_tokens_keep_their_ids_and_properties(base, tmp_path):
    folder, tokenizer = base
    first = len(tokenizer)
    word = tokenizer.convert_ids_to_tokens(first // 2)  # of the model's vocabulary
    tokenizer.add_tokens([AddedToken("<plain>", normalized=False), word])
    tokenizer.add_tokens([AddedToken("<strip>", lstrip=True, rstrip=True, single_word=True)])
    own = own_of(saved(tokenizer, tmp_path / "own"), folder)
    off = {"special": False, "lstrip": False, "rstrip": False, "single_word": False}
    assert list(own) == ["added_tokens"]
    assert own["added_tokens"] == [
        off | {"id": first // 2, "content": word, "normalized": True},
        off | {"id": first, "content": "<plain>", "normalized": False},
        {"id": first + 1, "content": "<strip>", "special": False, "lstrip": True, "rstrip": True,
         "single_word": True, "normalized": True},
    ]  # fmt: skip


@given(st.lists(st.sampled_from(["<a>", "<b>", "<c>", "e", "<|im_end|>", ""]), max_size=8))
def test_ids_are_those_that_loading_gives(texts):
    """Loading leaves no gaps, takes tokens of the vocabulary for what they are, and each once."""
    parts = json.loads(make_tokenizer("qwen2").to_str())
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    parts["added_tokens"] += [
        flags | {"id": 9000 + 7 * i, "content": text, "special": i % 2 == 0}
        for i, text in enumerate(texts)
    ]
    loaded = HFTokenizer.from_str(json.dumps(parts))
    found = own_tokenizer._loaded_tokens(parts)
    assert {text: token["id"] for text, token in found.items()} == {
        text: loaded.token_to_id(text) for text in found
    }
    assert found.keys() == {token.content for token in loaded.get_added_tokens_decoder().values()}


def test_a_token_of_the_base_model_may_become_special(tmp_path):
    hf = make_tokenizer("qwen2")
    hf.save(str(tmp_path / TOKENIZER))
    own = tmp_path / "own"
    own.mkdir()
    hf.add_special_tokens(["<tool_call>"])
    hf.save(str(own / TOKENIZER))
    (token,) = own_of(own, tmp_path)["added_tokens"]
    assert (token["content"], token["special"]) == ("<tool_call>", True)
    assert token["id"] == hf.token_to_id("<tool_call>")


def test_an_end_of_answers_is_found_by_the_config_alone(base, tmp_path):
    folder, tokenizer = base
    word = tokenizer.convert_ids_to_tokens(700)
    (tmp_path / TOKENIZER_CONFIG).write_text(json.dumps({"eos_token": {"content": word}}))
    own = own_of(tmp_path, folder)
    assert own["eos_token_ids"] == [700]
    assert [(t["content"], t["special"]) for t in own["added_tokens"]] == [(word, True)]
    (tmp_path / TOKENIZER_CONFIG).write_text(json.dumps({"eos_token": "<no such token>"}))
    assert own_of(tmp_path, folder) is None


@pytest.mark.parametrize("form", ["string", "list", "file"])
def test_a_template_is_found_where_transformers_looks_for_it(base, tmp_path, form):
    config = {"string": CHATML, "list": [{"name": "default", "template": CHATML}], "file": "x"}
    (tmp_path / TOKENIZER_CONFIG).write_text(json.dumps({"chat_template": config[form]}))
    if form == "file":
        (tmp_path / CHAT_TEMPLATE).write_text(CHATML)
    assert own_of(tmp_path, base[0]) == {"chat_template": CHATML}


# ---- the same tokenizer in another form ----


def merges_as_text(parts):
    parts["model"]["merges"] = [" ".join(merge) for merge in parts["model"]["merges"]]


def other_library(parts):
    """Forms that other versions of the library, and trainers that build tokenizers, write."""
    parts |= {"version": "2.0", "truncation": {"max_length": 9}, "padding": {"pad_id": 0}}
    parts["model"] |= {"dropout": None, "continuing_subword_prefix": "", "end_of_word_suffix": ""}
    for name in ("byte_fallback", "ignore_merges", "fuse_unk", "unk_token"):
        if not parts["model"].get(name):
            parts["model"].pop(name, None)
    parts["decoder"] = {"type": "Sequence", "decoders": [parts["decoder"]]}
    if parts["post_processor"] is None:
        parts["post_processor"] = {
            "type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [], "special_tokens": {},
        }  # fmt: skip


def old_metaspace(parts):
    step = parts["pre_tokenizer"]
    if step and step["type"] == "Metaspace" and step["prepend_scheme"] == "always":
        del step["prepend_scheme"], step["split"]
        step |= {"add_prefix_space": True, "str_rep": step["replacement"]}


@pytest.mark.parametrize("change", [merges_as_text, other_library, old_metaspace])
def test_another_form_of_the_same_tokenizer_is_the_same(base, tmp_path, change):
    folder, tokenizer = base
    own = changed(saved(tokenizer, tmp_path / "own"), change)
    assert own_of(own, folder) is None


# ---- another tokenizer ----


def swap(parts):
    vocab = parts["model"]["vocab"]
    first, other = list(vocab)[500], list(vocab)[900]
    vocab[first], vocab[other] = vocab[other], vocab[first]


def shorten(parts):
    vocab = parts["model"]["vocab"]
    del vocab[list(vocab)[1000]]


def lengthen(parts):
    parts["model"]["vocab"]["longer than before"] = 5000


def lack(parts):
    parts["added_tokens"].pop()


def move(parts):
    parts["added_tokens"].insert(0, parts["added_tokens"][0] | {"content": "<first>"})


def reorder(parts):
    merges = parts["model"]["merges"]
    merges[7], merges[8] = merges[8], merges[7]


@pytest.mark.parametrize(
    ("change", "said"),
    [(swap, "token .* has the id"), (shorten, "has no id, the base model's the id"),
     (lengthen, "'longer than before' has the id 5000, the base model's no id"),
     (lack, "token .* has no id"), (reorder, r"tokenizer.json:model.merges\[7\]"),
     (lambda parts: parts["model"].update(ignore_merges=not parts["model"]["ignore_merges"]),
      "tokenizer.json:model.ignore_merges"),
     (lambda parts: parts.update(normalizer={"type": "Lowercase"}), "tokenizer.json:normalizer"),
     (lambda parts: parts.update(pre_tokenizer={"type": "Whitespace"}), "json:pre_tokenizer"),
     (lambda parts: parts.update(decoder={"type": "WordPiece"}), "tokenizer.json:decoder"),
     (lambda parts: parts.update(post_processor={
         "type": "TemplateProcessing", "special_tokens": {"x": {"ids": [5]}},
         "single": [{"Sequence": {"id": "A"}}, {"SpecialToken": {"id": "x"}}]}), "post_processor")],
)  # fmt: skip
def test_another_tokenizer_is_refused_by_the_first_difference(base, tmp_path, change, said):
    folder, tokenizer = base
    own = changed(saved(tokenizer, tmp_path / "own"), change)
    with refused("tokenizer_mismatch", match=said) as caught:
        own_of(own, folder)
    assert "An upload without tokenizer.json has what" in str(caught.value)


def test_a_base_models_token_that_lies_elsewhere_is_named(tmp_path):
    hf = make_tokenizer("llama3")
    hf.save(str(tmp_path / TOKENIZER))
    (tmp_path / "own").mkdir()
    hf.save(str(tmp_path / "own" / TOKENIZER))
    own = changed(tmp_path / "own", move)
    first = hf.token_to_id("<|begin_of_text|>")
    said = rf"'<\|begin_of_text\|>' has the id {first + 1}, the base model's the id {first}"
    with pytest.raises(InvalidAdapter, match=said):
        own_of(own, tmp_path)


# ---- limits, and files that are no tokenizers ----


def adding(texts):
    def change(parts):
        like = dict.fromkeys(("special", "lstrip", "rstrip", "single_word", "normalized"), False)
        parts["added_tokens"] += [like | {"id": 0, "content": text} for text in texts]

    return change


@pytest.mark.parametrize(
    ("change", "code"),
    [(adding([f"<{i}>" for i in range(1024)]), None),
     (adding([f"<{i}>" for i in range(1025)]), "invalid_tokenizer"),
     (adding(["é" * 64]), None), (adding(["é" * 64 + "e"]), "invalid_tokenizer"),
     (adding(["\ud800"]), "invalid_tokenizer"), (adding([7]), "invalid_tokenizer"),
     (lambda parts: parts.update(added_tokens=[{}]), "invalid_tokenizer"),
     (lambda parts: parts.update(model=3), "invalid_tokenizer"),
     (lambda parts: parts["model"].update(vocab=[]), "invalid_tokenizer"),
     (lambda parts: parts.update(decoder={"type": "Sequence", "decoders": 3}), "invalid_tokenizer"),
     (lambda parts: parts.update(post_processor={"type": "TemplateProcessing", "single": []}),
      "invalid_tokenizer"),
     (lambda parts: parts.clear(), "invalid_tokenizer")],
)  # fmt: skip
def test_limits_and_damage(base, tmp_path, change, code):
    folder, tokenizer = base
    own = changed(saved(tokenizer, tmp_path / "own"), change)
    if code is None:
        assert own_of(own, folder)
        return
    with refused(code):
        own_of(own, folder)


def test_an_added_token_without_an_embedding_is_refused(base, tmp_path):
    folder, tokenizer = base
    num_ids = len(tokenizer)
    tokenizer.add_tokens(["<new>"])
    own = saved(tokenizer, tmp_path / "own")
    with pytest.raises(InvalidAdapter, match=f"'<new>' has the id {num_ids}.*save the adapter"):
        own_of(own, folder, num_ids)
    assert own_of(own, folder, num_ids + 1)


def test_a_token_that_only_fills_batches_needs_no_embedding(base, tmp_path):
    """Many trainers add one, and save neither embedding nor head."""
    folder, tokenizer = base
    num_ids = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert own_of(saved(tokenizer, tmp_path / "own"), folder, num_ids) is None
    assert own_of(tmp_path / "own", folder)["added_tokens"][0]["content"] == "[PAD]"
    tokenizer.eos_token = "[PAD]"
    with pytest.raises(InvalidAdapter, match="tokens have embeddings"):
        own_of(saved(tokenizer, tmp_path / "ends"), folder, num_ids)


def test_a_template_has_limits_and_must_parse(base, tmp_path):
    template = tmp_path / CHAT_TEMPLATE
    template.write_text("{% for x in y %}")
    with pytest.raises(InvalidAdapter, match="chat_template.jinja: it does not parse: line 1"):
        own_of(tmp_path, base[0])
    template.write_text("x" * (TOKENIZER_FILES[CHAT_TEMPLATE] + 1))
    with pytest.raises(TooLarge, match=CHAT_TEMPLATE):
        own_of(tmp_path, base[0])
    template.unlink()
    long = {"chat_template": "é" * (TOKENIZER_FILES[CHAT_TEMPLATE] // 2 + 1)}
    (tmp_path / TOKENIZER_CONFIG).write_text(json.dumps(long))
    with pytest.raises(TooLarge, match="tokenizer_config.json:chat_template"):
        own_of(tmp_path, base[0])


@pytest.mark.parametrize(
    "config",
    [{"x_token": "x" * 129}, {f"{i}_token": "x" for i in range(17)}, {"chat_template": [{}]},
     {"chat_template": 3}],
)  # fmt: skip
def test_a_config_that_is_too_much_or_none_is_refused(base, tmp_path, config):
    (tmp_path / CHAT_TEMPLATE).write_text(" ".join(config))
    if "chat_template" in config:
        (tmp_path / CHAT_TEMPLATE).unlink()
    (tmp_path / TOKENIZER_CONFIG).write_text(json.dumps(config))
    with refused("invalid_tokenizer"):
        own_of(tmp_path, base[0])
