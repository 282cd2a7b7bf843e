"""Texts whose bytes alone say that they have more tokens than a model takes."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from server.text.text_length import most_bytes_per_token
from tests.tokenizer_families import FAMILIES, make_tokenizer

CHARACTERS = st.characters(exclude_categories=["Cs"])
PIECES = [
    " ",
    " " * 16,
    "\n\n",
    "def ",
    "\u1112\u1161\u11ab",
    "e\u0301",
    "<|im_end|>",
    "é",
    "\u2581",
]
texts = st.tuples(
    st.lists(st.sampled_from(PIECES) | st.text(CHARACTERS, max_size=4), max_size=6).map("".join),
    st.integers(1, 40),
).map(lambda pair: pair[0] * pair[1])


def bound_of(hf):
    return most_bytes_per_token(json.loads(hf.to_str()))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_text_has_fewer_tokens_than_its_bytes_say(family):
    hf = make_tokenizer(family)
    most = bound_of(hf)

    @settings(max_examples=50, deadline=None)
    @given(texts)
    def check(text):
        num_tokens = len(hf.encode(text, add_special_tokens=False).ids)
        assert len(text.encode()) <= num_tokens * most

    check()


def drops_accents(hf):
    hf.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])


def drops_blanks(hf):
    hf.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")


def drops_words(hf):
    hf.normalizer = normalizers.Replace("a", "")


def swallows_blanks(hf):
    hf.add_special_tokens([AddedToken("<|mask|>", lstrip=True)])


def knows_few_letters(hf):
    hf.model = models.BPE(vocab={"a": 0, "?": 1}, merges=[], unk_token="?", fuse_unk=True)


@pytest.mark.parametrize(
    "change", [drops_accents, drops_blanks, drops_words, swallows_blanks, knows_few_letters]
)
def test_nothing_is_said_of_a_tokenizer_that_may_drop_text(change):
    hf = make_tokenizer("mistral")
    assert bound_of(hf) is not None
    change(hf)
    assert bound_of(hf) is None
