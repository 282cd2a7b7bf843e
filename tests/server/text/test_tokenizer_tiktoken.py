"""tiktoken is used only where it gives Hugging Face's ids."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from server.text.tiktoken_encoding import (
    BLANK_BLOCK,
    GPT2,
    PATTERNS,
    NotExact,
    TiktokenEncoding,
)
from tests.tokenizer_families import make_tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["".join(w) for n in range(1, 10) for w in itertools.product("ab", repeat=n)]
PROBES = ("a{c}\n1{c}\n!{c}\n'{c}b\n", "'l{c}b\n'r{c}b\n'v{c}b\n")
EXACT = []
"""Whether tiktoken may serve each of the vocabularies that hypothesis generated."""


def read(hf):
    return TiktokenEncoding(json.loads(hf.to_str()), hf)


def byte_level(pattern, tokens=(), merges=(), ignore_merges=False):
    names = [*ALPHABET, *dict.fromkeys(tokens)]
    vocab = {name: index for index, name in enumerate(names)}
    hf = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), ignore_merges=ignore_merges))
    hf.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    hf.decoder = decoders.ByteLevel()
    return hf


# ---- merges ----


@st.composite
def vocabularies(draw):
    """Tokens of a and b, maybe shuffled, with learned merges or all possible ones (as Llama 3)."""
    tokens, merges = ["a", "b"], []
    for _ in range(draw(st.integers(1, 8))):
        pair = draw(st.tuples(st.sampled_from(tokens), st.sampled_from(tokens)))
        if len("".join(pair)) <= 6 and pair not in merges:
            merges.append(pair)
            tokens.append("".join(pair))
    tokens += draw(st.lists(st.text("ab", min_size=2, max_size=5), max_size=3))
    tokens = [token for token in dict.fromkeys(tokens) if len(token) > 1]
    tokens = draw(st.just(tokens) | st.permutations(tokens))
    if draw(st.booleans()):
        known = {"a", "b", *tokens}
        cuts = [(t[:i], t[i:]) for t in tokens for i in range(1, len(t))]
        merges = [cut for cut in cuts if known.issuperset(cut)]
    return tokens, merges, draw(st.booleans())


@settings(max_examples=80, deadline=None)
@given(vocabularies())
def check_vocabulary(vocabulary):
    hf = byte_level(GPT2, *vocabulary)
    try:
        ours = read(hf)
    except NotExact:
        EXACT.append(False)
        return
    EXACT.append(True)
    expected = hf.encode_batch_fast(WORDS, add_special_tokens=False)
    assert [ours.encode(word) for word in WORDS] == [encoding.ids for encoding in expected]


def test_a_vocabulary_that_is_taken_merges_every_word_alike():
    check_vocabulary()
    assert any(EXACT)
    assert not all(EXACT)


@pytest.mark.parametrize(
    ("tokens", "merges", "ignore_merges"),
    [
        (["ab", "ba", "aba"], [("a", "b"), ("b", "a"), ("a", "ba")], False),
        (["ab", "aab"], [("a", "b")], False),
        (["ab", "abb"], [("a", "b")], True),
        (["ba", "ab"], [("a", "b"), ("b", "a")], False),
    ],
    ids=["unreachable", "without a merge", "looked up whole, mergeable by tiktoken", "order"],
)
def test_a_vocabulary_that_tiktoken_would_merge_otherwise_is_refused(tokens, merges, ignore_merges):
    with pytest.raises(NotExact, match="merge"):
        read(byte_level(GPT2, tokens, merges, ignore_merges))


def test_checking_leaves_the_tokenizer_as_it_was():
    hf = byte_level(GPT2, ["ab", "abb"], [("a", "b"), ("ab", "b")], ignore_merges=True)
    read(hf)
    assert hf.model.ignore_merges


# ---- everything else that may differ ----


def added(name, **options):
    return lambda hf: hf.add_tokens([AddedToken(name, **({"normalized": False} | options))])


def assign(name, value):
    return lambda hf: setattr(hf, name, value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (added("<a>", lstrip=True), "stands beside"),
        (added("<a>", single_word=True), "stands beside"),
        (added("<a>", normalized=True), "normalized text"),
        (added("<think>more"), "begins with another"),
        (assign("normalizer", normalizers.NFKC()), "normalizer NFKC"),
        (assign("normalizer", normalizers.Sequence([normalizers.NFC()])), "normalizer Sequence"),
        (assign("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)), "one pattern"),
        (assign("pre_tokenizer", pre_tokenizers.Digits()), "one pattern"),
        (assign("pre_tokenizer", pre_tokenizers.Split(Regex(GPT2), "isolated")), "not known"),
        (assign("pre_tokenizer", pre_tokenizers.Split(Regex(GPT2), "removed")), "one pattern"),
        (assign("pre_tokenizer", pre_tokenizers.ByteLevel(False, use_regex=False)), "not known"),
        (assign("model", models.BPE({"a": 0}, [])), "no token for some bytes"),
        (assign("model", models.BPE({"a": 0}, [], byte_fallback=True)), "no plain byte-level BPE"),
        (assign("model", models.WordLevel({"a": 0}, "a")), "no plain byte-level BPE"),
    ],
)
def test_what_tiktoken_does_otherwise_is_refused(change, reason):
    hf = make_tokenizer("qwen2")
    read(hf)
    change(hf)
    with pytest.raises(NotExact, match=reason):
        read(hf)


def test_text_that_would_be_normalized_is_not_taken():
    ours = read(make_tokenizer("qwen2"))
    assert ours.takes("é, <|im_end|>, 日本")
    assert not ours.takes("e\u0301")
    assert not ours.takes("<|im_end|>\u0338")
    assert read(make_tokenizer("llama3")).takes("e\u0301")


@pytest.mark.parametrize("blank", [" ", "\n", "\u3000", " \t"])
@pytest.mark.parametrize("before", ["", "x" * 1000])
def test_a_run_of_blanks_that_tiktoken_might_give_up_on_is_not_taken(blank, before):
    ours = read(make_tokenizer("llama3"))
    runs = blank * (2 * BLANK_BLOCK)
    assert not ours.takes(before + runs[: 2 * BLANK_BLOCK - 1] + "x")
    assert ours.takes(before + (runs[: BLANK_BLOCK - 1] + "x") * 3)
    assert ours.encode(runs) == make_tokenizer("llama3").encode(runs).ids[1:]


# ---- patterns ----


@pytest.mark.parametrize("pattern", PATTERNS)
def test_both_sort_the_characters_in_use_alike(pattern):
    check_characters(pattern, [*range(0x900), *range(0x2000, 0x2100), *range(0x3000, 0x3100)])


@pytest.mark.soak
@pytest.mark.parametrize("pattern", PATTERNS)
def test_both_sort_all_characters_alike(pattern):
    check_characters(pattern, range(0x110000))


def check_characters(pattern, code_points):
    """Check that both split text alike around every character: the bytes of one piece are merged.

    Letters join the piece of a, digits that of 1, other signs that of !, and blanks none of them.
    """
    merges = [(left, right) for left in "a1!" for right in ALPHABET]
    merges += [(left, "b") for left in ALPHABET if (left, "b") not in merges]
    hf = byte_level(pattern, [left + right for left, right in merges], merges)
    ours = read(hf)
    characters = [chr(c) for c in code_points if not 0xD800 <= c < 0xE000]
    for start in range(0, len(characters), 4096):
        block = characters[start : start + 4096]
        text = "".join(probe.replace("{c}", c) for c in block for probe in PROBES)
        assert ours.encode(text) == hf.encode_batch_fast([text])[0].ids
