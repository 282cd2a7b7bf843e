"""Trained rows of an embedding or a head: which ones changed, and the LoRA that adds the change."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from registry.base.base_model import BaseModel
from registry.checks.validate import AdapterLimits, check_adapter
from registry.checks.validator import Validator
from registry.errors import InvalidAdapter
from registry.formats.peft_format import WEIGHTS_FILE, lora_names, write_canonical
from registry.formats.tensor_values import decode, round_to
from tests.registry.factories import (
    HIDDEN,
    encode,
    make_adapter,
    make_config,
    make_tensor,
    parse_canonical,
    sha256,
    write_base,
)

LIMITS = AdapterLimits()
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
COPY = {module: f"base_model.model.{module}.weight" for module in (EMBEDDING, HEAD)}
TOKENS = {
    module: f"base_model.model.{module}.token_adapter.trainable_tokens_delta" for module in COPY
}
VOCAB = 7


def save_base(folder, ends, *, tied=False):
    """A base model with these weights of its ends, by module."""
    tensors = write_base(folder)
    tensors |= {f"{module}.weight": tensor for module, tensor in ends.items()}
    config = json.loads((folder / "config.json").read_text())
    config |= {"tie_word_embeddings": tied, "vocab_size": ends[EMBEDDING][1][0]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(encode(tensors))
    return BaseModel.load(folder, "tiny-llama", folder.parent / "cache")


def rows_of(seed, count=VOCAB):
    return np.random.default_rng(seed).normal(size=(count, HIDDEN)).astype(np.float32)


OLD = {EMBEDDING: rows_of(1), HEAD: rows_of(2)}


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    ends = {module: make_tensor(rows) for module, rows in OLD.items()}
    return save_base(tmp_path_factory.mktemp("untied") / "base", ends)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    embedding = {EMBEDDING: make_tensor(OLD[EMBEDDING])}
    return save_base(tmp_path_factory.mktemp("tied") / "base", embedding, tied=True)


def check(base, tensors, limits=LIMITS, **config):
    weights = io.BytesIO(encode(make_adapter(base, targets=["q_proj"]) | tensors))
    changes = {"target_modules": ["q_proj"], **config}
    return weights, check_adapter(make_config(**changes), weights, base, limits)


def refused(base, tensors, limits=LIMITS, **config):
    with pytest.raises(InvalidAdapter) as caught:
        check(base, tensors, limits, **config)
    return caught.value


def served(base, tensors, **config):
    """The sums that the canonical object adds to the ends, [vocab, hidden], and its passport."""
    weights, checked = check(base, tensors, **config)
    written = io.BytesIO()
    write_canonical(written, weights, checked.adapter)
    data = written.getvalue()
    assert len(data) == checked.passport.size_bytes
    adapter = parse_canonical(data)
    added = {}
    for module in {EMBEDDING, HEAD} & adapter.modules.keys():
        a, b = (
            decode(data[info.start : info.end], info.dtype).reshape(info.shape)
            for info in (adapter.tensors[name] for name in lora_names(module))
        )
        product = adapter.modules[module].scale * (b @ a)
        added[module] = product.T if module == EMBEDDING else product
    return added, checked.passport


def trained(rows, token_ids):
    new = rows.copy()
    new[token_ids] += rows_of(9, len(token_ids))
    return new


DTYPES = st.sampled_from(["F32", "F16", "BF16"])


@settings(deadline=None, max_examples=60)
@given(DTYPES, DTYPES, st.sets(st.integers(0, VOCAB - 1)), st.sampled_from([EMBEDDING, HEAD]))
def test_the_lora_turns_exactly_the_changed_rows_into_the_uploaded_ones(
    tmp_path_factory, stored, uploaded, token_ids, module
):
    old = {name: round_to(rows, stored) for name, rows in OLD.items()}
    ends = {name: make_tensor(rows, stored) for name, rows in old.items()}
    base = save_base(tmp_path_factory.mktemp("base") / "base", ends)
    new = round_to(trained(old[module], sorted(token_ids)), uploaded)
    added, passport = served(base, {COPY[module]: make_tensor(new, uploaded)})
    told = f"The files have a copy of the base model's {module}.weight, which was not trained"
    if not token_ids:
        assert not added
        assert passport.warnings == [f"{told}; left out."]
        return
    rows = sorted(token_ids)
    assert added[module].any(axis=1).nonzero()[0].tolist() == rows
    np.testing.assert_allclose((old[module] + added[module])[rows], new[rows], rtol=0, atol=2e-6)
    assert passport.ranks == {"4": 2} | {str(len(rows)): 1 + 2 * (len(rows) == 4)}
    assert passport.warnings == []


def test_trained_tokens_override_the_rows_of_the_weight_that_they_are_put_into(untied):
    new = trained(OLD[EMBEDDING], [1, 2])
    tokens = np.stack([OLD[EMBEDDING][2], rows_of(5, 1)[0]])
    copy = COPY[EMBEDDING].replace(".weight", ".token_adapter.base_layer.weight")
    tensors = {copy: make_tensor(new), TOKENS[EMBEDDING]: make_tensor(tokens)}
    added, _ = served(untied, tensors, trainable_token_indices={"model.embed_tokens": [2, 5]})
    assert added[EMBEDDING].any(axis=1).nonzero()[0].tolist() == [1, 5]


ONE_ROW = trained(OLD[EMBEDDING], [3])


def test_two_copies_of_one_weight_that_differ_are_refused_by_name(tied):
    other = trained(OLD[EMBEDDING], [4])
    error = refused(tied, {COPY[EMBEDDING]: make_tensor(ONE_ROW), COPY[HEAD]: make_tensor(other)})
    assert COPY[EMBEDDING] in str(error)
    assert COPY[HEAD] in str(error)


@pytest.mark.parametrize("rows", [rows_of(8), np.ones(())])
def test_a_weight_below_a_saved_module_is_not_looked_at(untied, rows):
    unused = COPY[HEAD].replace(".weight", ".original_module.weight")
    tensors = {COPY[HEAD]: make_tensor(OLD[HEAD]), unused: make_tensor(rows)}
    assert served(untied, tensors, modules_to_save=["lm_head"])[0] == {}


@pytest.mark.parametrize("module", [EMBEDDING, HEAD])
def test_rows_lie_on_top_of_a_lora_of_the_same_module(untied, module):
    name_of_a, name_of_b = lora_names(module)
    num_inputs, num_outputs = untied.ends[module]
    a, b = rows_of(6).reshape(-1)[: 4 * num_inputs].reshape(4, -1), np.ones((num_outputs, 4))
    lora = {name_of_a: make_tensor(a, "BF16"), name_of_b: make_tensor(b, "F16")}
    config = {"target_modules": ["q_proj", module]}
    alone, _ = served(untied, lora, **config)
    copy = {COPY[module]: make_tensor(trained(OLD[module], [0, 6]))}
    both, passport = served(untied, lora | copy, **config)
    assert passport.rank == 6
    difference = both[module] - alone[module]
    expected = trained(OLD[module], [0, 6]) - OLD[module]
    np.testing.assert_allclose(difference, expected, rtol=0, atol=1e-5)


def tokens(rows=None, module=EMBEDDING):
    return {TOKENS[module]: make_tensor(rows_of(5, 1) if rows is None else rows)}


def copy(rows, dtype="F32"):
    return {COPY[EMBEDDING]: make_tensor(rows, dtype)}


def both(rows):
    return {name: make_tensor(rows) for name in COPY.values()}


NAN = trained(OLD[EMBEDDING], [3])
NAN[3, 1] = np.nan
TOO_MANY = trained(OLD[EMBEDDING], range(4, 7))
FAULTS = {
    "outside the vocabulary": (tokens(), [VOCAB], "invalid_config", "has 7; there are 7 tokens"),
    "a huge id": (tokens(), [2**70], "invalid_config", "are 7 tokens"),
    "twice": (tokens(rows_of(5, 2)), [3, 3], "invalid_config", "names a token or a module twice"),
    "a module twice": (
        tokens(), {"embed_tokens": [3], "model.embed_tokens": [3]}, "invalid_config", "twice",
    ),
    "negative": (tokens(), [-1], "invalid_config", "token ids from 0"),
    "no ids": (tokens(), [True], "invalid_config", "token ids from 0"),
    "no list": (tokens(), "all", "invalid_config", "token ids from 0"),
    "of another module": (tokens(), {"q_proj": [1]}, "invalid_config", "names 'q_proj'"),
    "fewer rows": (tokens(), [1, 2], "wrong_shape", "is [1, 16]; its 2 rows"),
    "other rows": (tokens(np.ones((1, 8))), [1], "wrong_shape", "is [1, 8]"),
    "no tensor": ({}, [1], "target_mismatch", f"{WEIGHTS_FILE} has none"),
    "no tokens": (tokens(), None, "target_mismatch", "adapter_config.json has none"),
    "too many tokens": (tokens(rows_of(5, 5)), [0, 1, 2, 3, 4], "rank_too_large", "5 tokens"),
    "a NaN": (copy(NAN), None, "not_finite", COPY[EMBEDDING]),
    "a NaN of a token": (tokens(NAN[3:4]), [3], "not_finite", TOKENS[EMBEDDING]),
    "too many rows": (copy(TOO_MANY), None, "unsupported_feature", "changed 3 of 7 rows"),
    "too many rows, and a token more": (
        both(np.ones((VOCAB + 1, HIDDEN))), None, "unsupported_feature", "with "
        "trainable_token_indices.",
    ),
    "another width": (copy(np.ones((VOCAB, 8))), None, "wrong_shape", "is [7, 8]"),
    "no rows": (copy(np.ones((0, HIDDEN))), None, "empty_tensor", "shape [0, 16]"),
    "65 tokens more": (
        both(np.ones((VOCAB + 65, HIDDEN))), None, "wrong_shape", "add at most 64 tokens",
    ),
    "a number": (copy(np.ones(())), None, "wrong_shape", "is []"),
    "a vector": (copy(np.ones(HIDDEN)), None, "wrong_shape", "is [16]"),
    "a billion empty rows": (copy(np.ones((10**9, 0))), None, "empty_tensor", "1000000000, 0]"),
    "other numbers": (copy(OLD[EMBEDDING], "F64"), None, "unsupported_dtype", "is F64"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_rows_that_are_not_sound_are_refused_with_what_is_wrong(untied, case):
    tensors, token_ids, code, said = FAULTS[case]
    error = refused(untied, tensors, AdapterLimits(max_rank=2), trainable_token_indices=token_ids)
    assert (error.code, said in str(error)) == (code, True), error


RESIZED = {module: np.concatenate([OLD[module], rows_of(7, 3)]) for module in COPY}
RESIZED[HEAD][VOCAB + 1] = 0


def copies():
    return {COPY[module]: make_tensor(rows) for module, rows in RESIZED.items()}


def test_rows_behind_the_base_models_are_added_to_its_vocabulary(untied):
    weights, checked = check(untied, copies())
    assert checked.passport.vocab_size == checked.adapter.vocab_size == VOCAB + 3
    added, _ = served(untied, copies())
    for module, rows in added.items():
        np.testing.assert_allclose(rows[VOCAB:], RESIZED[module][VOCAB:], rtol=0, atol=2e-6)
        assert not rows[:VOCAB].any()
    ranks = {name: effect.rank for name, effect in checked.adapter.modules.items()}
    assert (ranks[EMBEDDING], ranks[HEAD]) == (3, 2)


def test_the_object_says_how_many_tokens_there_are_only_if_some_were_added(untied):
    def told(tensors):
        weights, checked = check(untied, tensors)
        written = io.BytesIO()
        write_canonical(written, weights, checked.adapter)
        return parse_canonical(written.getvalue()).vocab_size

    assert told(copies()) == VOCAB + 3
    assert told(copy(ONE_ROW)) is None


def test_a_trained_token_may_be_an_added_one(untied):
    new = rows_of(5, 1)
    tensors = copies() | tokens(new)
    added, _ = served(untied, tensors, trainable_token_indices=[VOCAB + 2])
    np.testing.assert_allclose(added[EMBEDDING][VOCAB + 2], new[0], rtol=0, atol=2e-6)
    error = refused(untied, tensors, trainable_token_indices=[VOCAB + 3])
    assert f"has {VOCAB + 3}; there are {VOCAB + 3} tokens" in str(error)


def test_one_end_that_was_resized_alone_is_refused(untied, tied):
    alone = {COPY[EMBEDDING]: make_tensor(RESIZED[EMBEDDING])}
    error = refused(untied, alone)
    assert (error.code, "to both model.embed_tokens and lm_head" in str(error)) == (
        "wrong_shape",
        True,
    )
    assert check(tied, alone)[1].adapter.vocab_size == VOCAB + 3
    assert refused(tied, alone, modules_to_save=["embed_tokens"]).code == "wrong_shape"


def test_rows_that_a_smaller_weight_lacks_stay_the_base_models(untied):
    added, passport = served(untied, copy(ONE_ROW[:5]))
    assert added[EMBEDDING].any(axis=1).nonzero()[0].tolist() == [3]
    assert passport.warnings == [
        "The files have 5 rows of model.embed_tokens.weight; the base model's other 2 stay."
    ]
    assert passport.vocab_size is None


def test_rows_and_a_lora_of_one_module_share_the_limit_of_its_rank(untied):
    a, b = (make_tensor(np.ones(shape)) for shape in ((4, VOCAB), (HIDDEN, 4)))
    lora = dict(zip(lora_names(EMBEDDING), (a, b), strict=True))
    config = {"target_modules": ["q_proj", "embed_tokens"]}
    error = refused(untied, lora | copy(ONE_ROW), AdapterLimits(max_rank=4), **config)
    assert (error.code, "rank 4 and 1 trained rows" in str(error)) == ("rank_too_large", True)


def test_trained_tokens_beside_lora_of_the_same_module_are_refused_as_in_peft(untied):
    lora = {name: make_tensor(np.ones((4, VOCAB))) for name in lora_names(EMBEDDING)}
    config = {"trainable_token_indices": [1], "target_modules": ["q_proj", "embed_tokens"]}
    error = refused(untied, lora | tokens(), **config)
    assert (error.code, error.param) == ("unsupported_feature", "trainable_token_indices")
    saved = {"trainable_token_indices": [1], "modules_to_save": ["embed_tokens"]}
    assert refused(untied, tokens(), **saved).param == "trainable_token_indices"


def test_rows_beside_an_activated_lora_are_refused(untied):
    error = refused(untied, copy(ONE_ROW), alora_invocation_tokens=[1])
    assert (error.code, error.param) == ("unsupported_feature", "alora_invocation_tokens")


def test_rows_of_a_head_that_is_stored_quantised_are_refused_by_name(base):
    # It has no tensor of this name then, but words of packed numbers.
    name = "base_model.model.lm_head.weight"
    error = refused(base, {name: make_tensor(OLD[HEAD])})
    assert error.code == "unsupported_feature"
    assert f"'{name}' has rows of lm_head, which tiny-llama stores quantised" in str(error)


def test_the_confined_process_reads_the_base_models_rows(untied, tied, tmp_path):
    """The gateway opens them for it, those of all base models that may be meant."""
    config, weights, target = (tmp_path / name for name in ("config", "weights", "target"))
    config.write_bytes(make_config(target_modules=["q_proj"], base_model_name_or_path="twin"))
    adapter = make_adapter(untied, targets=["q_proj"]) | copies()
    weights.write_bytes(encode(adapter))
    bases = [replace(tied, model_id="other"), replace(untied, model_id="twin")]
    validated = Validator(LIMITS).check(bases, config, weights, target)
    file, checked = check(untied, copies())
    written = io.BytesIO()
    write_canonical(written, file, checked.adapter)
    assert validated.base_model == "twin"
    assert validated.digest == sha256(written.getvalue()) == sha256(target.read_bytes())


def test_the_object_of_a_few_tokens_may_be_far_larger_than_their_upload(tmp_path):
    vocab, token_ids = 200_000, list(range(0, 200, 10))
    zeros = make_tensor(np.zeros((vocab, HIDDEN), np.float32), "F16")
    base = save_base(tmp_path / "base", {EMBEDDING: zeros, HEAD: zeros})
    config, weights, target = (tmp_path / name for name in ("config", "weights", "target"))
    config.write_bytes(make_config(target_modules=["q_proj"], trainable_token_indices=token_ids))
    adapter = make_adapter(base, targets=["q_proj"]) | tokens(rows_of(5, 20))
    weights.write_bytes(encode(adapter))
    validated = Validator(LIMITS).check([base], config, weights, target)
    assert validated.passport["rank"] == 20
    assert validated.size_bytes == target.stat().st_size > 20 * vocab * 2
