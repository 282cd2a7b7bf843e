"""Tokenizers of every family: Hugging Face's ids, and streams of bytes decoded to characters."""

import itertools
import json
import random
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

from server.text.tiktoken_encoding import BLANK_BLOCK
from server.text.tokenizer import Detokenizer, Tokenizer, UnsupportedTokenizer
from tests.tokenizer_families import FAMILIES, SPACE, make_tokenizer

DEMO = Path(__file__).parents[3] / "demo" / "model"
FAST = {"demo", "llama3", "qwen2"}
SCHEMES = ("always", "first", "never")
TEXTS = [
    "Hello, wörld! 12345", "def f(x):\n\treturn x\r\n", "日本語 🙂👩‍👩‍👧", "عربي ไทย",
    "a" * 1000, " " * 200, "\x00\x01\x7f", "", "naïve café e\u0301", " leading", "x  y   z\n\n  ",
    "한국어 ㅎㅏㄴ \u1112\u1161\u11ab", "🏳️‍🌈👍🏽🇩🇪", "\u2581a\u2581", "1234567890" * 9,
    "I'LL we've 'ſ", "x<|user|>y", "x<|im_start|>\u0338y<|im_end|>",
    "<|begin_of_text|><s></s>[INST] x [/INST]",
    "<think>\u0301</think><tool_call>", "\u200d\u0300\u0301", "\ufeff\u2028\u3000\x85",
    "<0x0A><unk>", "\u212a\u037e", "http://a.b/c?d=e&f#g", "\n" * 50 + "\t" * 50, "<|end",
    "<|im_end|",
]  # fmt: skip
CHARACTERS = st.characters(exclude_categories=["Cs"])
texts = st.one_of(
    st.sampled_from(TEXTS),
    st.text(CHARACTERS, max_size=100),
    st.lists(st.sampled_from(TEXTS) | st.text(CHARACTERS, max_size=9), max_size=5).map("".join),
    st.text(" \n\r\t'sS1l\u0301a\u00e9<|>[]", max_size=40),
)


@pytest.fixture(scope="module", params=["demo", *FAMILIES, *SCHEMES])
def family(request, tmp_path_factory):
    """(name, tokenizer, Hugging Face's tokenizer) of a family."""
    if request.param == "demo":
        hf = HFTokenizer.from_file(str(DEMO / "tokenizer.json"))
    elif request.param in SCHEMES:
        hf = make_tokenizer("mistral")
        hf.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=request.param, split=True)
    else:
        hf = make_tokenizer(request.param)
    return request.param, load(tmp_path_factory.mktemp("model"), hf), hf


def load(folder, hf, **configs):
    hf.save(str(folder / "tokenizer.json"))
    for name, config in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    return Tokenizer(folder)


# ---- text to tokens ----


def test_ids_are_hugging_faces(family):
    _, ours, hf = family

    @settings(max_examples=60, deadline=None)
    @given(texts, st.booleans())
    def check(text, special):
        expected = hf.encode(text, add_special_tokens=special).ids
        assert ours.encode(text, add_special_tokens=special) == expected

    check()


def test_which_families_are_fast(family):
    name, ours, _ = family
    assert (ours._tiktoken is not None) == (name in FAST)


@pytest.mark.parametrize("unit", [" ", "a", " \n", "e\u0301", "<|"])
def test_a_long_run_is_tokenized_as_hugging_face_does(family, unit):
    _, ours, hf = family
    text = "x" + unit * (2 * BLANK_BLOCK // len(unit) + 7) + "x"
    assert ours.encode(text) == hf.encode(text).ids


@pytest.mark.parametrize("name", ["llama2", "llama3"])
def test_other_threads_run_while_a_long_prompt_is_tokenized(name, tmp_path):
    ours = load(tmp_path, make_tokenizer(name))
    thread = threading.Thread(target=ours.encode, args=("日本 " * 200_000,))
    times = [time.perf_counter()]
    thread.start()
    while thread.is_alive():
        times.append(time.perf_counter())
    longest_gap = max(later - earlier for earlier, later in itertools.pairwise(times))
    assert longest_gap < 0.8 * (times[-1] - times[0])


def test_a_chat_begins_once_and_a_completion_begins_at_all(tmp_path):
    template = "{{ bos_token }}{{ messages[0].content }}"
    config = {"bos_token": "<|begin_of_text|>", "chat_template": template}
    ours = load(tmp_path, make_tokenizer("llama3"), tokenizer_config=config)
    begin = ours.encode("<|begin_of_text|>", add_special_tokens=False)
    text = ours.chat_template.render([{"role": "user", "content": "hi"}])
    assert ours.encode(text, add_special_tokens=False) == ours.encode("hi")
    assert ours.encode("hi")[:1] == begin
    assert ours.encode("hi").count(begin[0]) == 1
    assert ours.encode("") == begin


# ---- tokens to text ----


def test_streamed_text_is_the_decoded_text_however_it_is_cut(family):
    """Streams of well-formed text after a prompt decode as Hugging Face decodes the whole."""
    _, ours, hf = family
    prompt = hf.encode("Hi").ids
    words = [i for i, word in enumerate(ours.vocabulary) if is_text(word)]

    @settings(max_examples=60, deadline=None)
    @given(texts, st.lists(st.sampled_from(words), max_size=9), st.integers(0, 99))
    def check(text, more, seed):
        ids = hf.encode(text).ids + more
        expected = hf.decode(prompt + ids)[len(hf.decode(prompt)) :]
        pieces = stream(ours.vocabulary, ids, seed)
        assert "".join(pieces) == expected
        assert "\ufffd" in expected or not any("\ufffd" in piece for piece in pieces)

    check()


@pytest.mark.parametrize("name", ["llama3", "qwen2"])
def test_broken_bytes_are_replaced_as_hugging_face_does(name, tmp_path):
    hf = make_tokenizer(name)
    ours = load(tmp_path, hf)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(0, hf.get_vocab_size() - 1), max_size=20), st.integers(0, 99))
    def check(ids, seed):
        assert "".join(stream(ours.vocabulary, ids, seed)) == hf.decode(ids)

    check()


@pytest.mark.parametrize("name", ["llama2", "mistral"])
def test_a_broken_character_of_byte_tokens_is_one_mark(name, tmp_path):
    hf = make_tokenizer(name)
    ids = [hf.token_to_id(f"<0x{byte:02X}>") for byte in b"\xf0\x9f\x99"]
    assert stream(load(tmp_path, hf).vocabulary, ids, seed=0)[-1] == "\ufffd"


@pytest.mark.parametrize("name", ["llama2", "mistral"])
@pytest.mark.parametrize("prompt", ["[INST] Hi [/INST]", "Hi", "Hi</s>"])
def test_an_answer_keeps_the_space_between_it_and_its_prompt(name, prompt, tmp_path):
    hf = make_tokenizer(name)
    ours = load(tmp_path, hf)
    ids = ours.encode("Hello, wörld 🧿", add_special_tokens=False)
    # This is vLLM's way of decoding.
    theirs = decoders.DecodeStream(ids=hf.encode(prompt).ids, skip_special_tokens=True)
    expected = "".join(theirs.step(hf, token_id) or "" for token_id in ids)
    assert "".join(stream(ours.vocabulary, ids, seed=0)) == expected == " Hello, wörld 🧿"


def test_special_tokens_are_no_text_and_other_added_tokens_are(tmp_path):
    hf = make_tokenizer("qwen2")
    vocabulary = load(tmp_path, hf).vocabulary
    assert vocabulary[hf.token_to_id("<|im_end|>")] == b""
    assert vocabulary[hf.token_to_id("<tool_call>")] == b"<tool_call>"


def test_ids_may_have_holes(tmp_path):
    hf = make_tokenizer("qwen2")
    definition = json.loads(hf.to_str())
    vocab = definition["model"]["vocab"]
    last = max((token for token in vocab if token.isascii()), key=vocab.get)
    vocab[last] += 100
    for number, token in enumerate(definition["added_tokens"]):
        token["id"] += 10 * number
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    ours, hf = Tokenizer(tmp_path), HFTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert ours.encode("<|im_end|></think>") == hf.encode("<|im_end|></think>").ids
    assert ours.vocabulary[hf.token_to_id("</think>")] == b"</think>"
    assert ours.vocabulary[vocab[last]] == last.encode()
    assert ours.vocabulary[vocab[last] - 1] == b""


def test_bytes_of_a_stop_string_are_cut():
    detokenizer = Detokenizer([b"", b"ab", b"cd"])
    assert detokenizer.push([1, 2], final=True, cut_bytes=3) == "a"


def stream(vocabulary, ids, seed):
    """Pieces of text from pushes of one to three tokens."""
    detokenizer, chance, pieces = Detokenizer(vocabulary), random.Random(seed), [""]
    while ids:
        size = chance.randint(1, 3)
        part, ids = ids[:size], ids[size:]
        pieces.append(detokenizer.push(part, final=not ids))
    return pieces


def is_text(word):
    try:
        return bool(word.decode())
    except UnicodeDecodeError:
        return False


# ---- tokens that end an answer ----


@pytest.mark.parametrize(
    ("generation_config", "config", "named", "expected"),
    [
        ([5, 7, 6], 5, None, (5, 6, 7)),
        (5, None, None, (5,)),
        (None, [6, 5], None, (5, 6)),
        (None, None, "</s>", (2,)),
        (None, None, {"content": "</s>"}, (2,)),
        ([5], 6, "</s>", (2, 5, 6)),
        (None, None, "<nobody's>", ()),
        (None, None, None, ()),
    ],
)
def test_every_id_that_ends_an_answer_is_found(
    tmp_path, generation_config, config, named, expected
):
    ours = load(
        tmp_path,
        make_tokenizer("llama2"),
        generation_config={"eos_token_id": generation_config},
        config={"eos_token_id": config},
        tokenizer_config={"eos_token": named},
    )
    assert ours.eos_token_ids == expected


def test_a_text_config_says_what_ends_an_answer_where_nothing_else_does(tmp_path):
    text = {"model_type": "mistral", "eos_token_id": 5}
    config = {"model_type": "mistral3", "text_config": text}
    assert load(tmp_path, make_tokenizer("llama2"), config=config).eos_token_ids == (5,)


# ---- folders that are refused ----


def test_a_template_that_does_not_parse_is_refused_at_the_start(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(UnsupportedTokenizer, match="chat template does not parse: line 1"):
        load(tmp_path, make_tokenizer("llama2"))


def test_a_folder_without_a_fast_tokenizer_is_refused(tmp_path):
    with pytest.raises(UnsupportedTokenizer, match="only fast tokenizers"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Fuse(),
        decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.Fuse(), decoders.Strip(" ", 0, 1)]
        ),
    ],
)
def test_tokens_that_cannot_be_written_as_bytes_are_refused(tmp_path, decoder):
    hf = make_tokenizer("llama2")
    hf.decoder = decoder
    with pytest.raises(UnsupportedTokenizer, match="does not write tokens as bytes"):
        load(tmp_path, hf)


def test_other_models_than_bpe_are_refused(tmp_path):
    with pytest.raises(UnsupportedTokenizer, match="its model is WordLevel"):
        load(tmp_path, HFTokenizer(models.WordLevel({"a": 0}, "a")))
