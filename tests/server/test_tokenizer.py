"""Text and tokens: the fast path equals Hugging Face's, and bytes come out as whole characters."""

import random
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer

from server.tokenizer import Detokenizer, TemplateError, Tokenizer, UnsupportedTokenizer

DEMO = Path(__file__).parents[2] / "demo" / "model"
TEXTS = [
    "Hello, wörld! 12345", "def f(x):\n\treturn x\r\n", "日本語 🙂👩‍👩‍👧", "عربي ไทย",
    "a" * 1000, " " * 200, "\x00\x01\x7f", "", "naïve café e\u0301", "<|end|>", "x<|user|>y",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(DEMO)


def test_the_demo_takes_the_fast_path(tokenizer):
    assert tokenizer._fast is not None


@given(st.one_of(st.sampled_from(TEXTS), st.text(max_size=200)))
@settings(max_examples=400, deadline=None)
def test_the_fast_path_gives_hugging_faces_ids(text):
    tokenizer, hf = _demo()
    assert tokenizer.encode(text) == hf.encode(text).ids


@cache
def _demo():
    return Tokenizer(DEMO), HFTokenizer.from_file(str(DEMO / "tokenizer.json"))


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=100), st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_streamed_text_is_the_whole_text_however_it_is_cut(text, seed):
    tokenizer, _ = _demo()
    ids = tokenizer.encode(text.replace("<|", "< |"))
    detokenizer, chance, pieces = Detokenizer(tokenizer.vocabulary), random.Random(seed), []
    while ids:
        size = chance.randint(1, 3)
        part, ids = ids[:size], ids[size:]
        pieces.append(detokenizer.push(part, final=not ids))
    assert "".join(pieces) == text.replace("<|", "< |")
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)


def test_bytes_of_a_stop_string_are_cut(tokenizer):
    detokenizer = Detokenizer([b"", b"ab", b"cd"])
    assert detokenizer.push([1, 2], final=True, cut_bytes=3) == "a"


def test_special_tokens_are_no_text(tokenizer):
    end = tokenizer.eos_token_ids[0]
    assert tokenizer.vocabulary[end] == b""


def test_a_chat_is_rendered_by_the_models_own_template(tokenizer):
    prompt = tokenizer.render([{"role": "user", "content": "hi {{ 7 * 7 }}"}])
    assert "hi {{ 7 * 7 }}" in prompt
    assert prompt.endswith("<|assistant|>")


def test_a_model_without_a_template_says_so(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    with pytest.raises(TemplateError, match="/v1/completions"):
        Tokenizer(tmp_path).render([{"role": "user", "content": "hi"}])


def test_a_folder_without_a_fast_tokenizer_is_refused(tmp_path):
    with pytest.raises(UnsupportedTokenizer, match="only fast tokenizers"):
        Tokenizer(tmp_path)
