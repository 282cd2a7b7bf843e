"""Rules by which the base model of an uploaded adapter is chosen, and when it has to be named."""

import io
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.base.base_model import BaseModel
from registry.base.base_tensor import BaseTensor
from registry.checks.base_choice import choose, choose_base, fits
from registry.checks.validate import AdapterLimits
from registry.errors import InvalidAdapter
from registry.formats.peft_format import Header, TensorInfo, lora_names
from tests.refusals import refused
from tests.registry.factories import encode, make_adapter, make_config

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
HEAD_COPY = "base_model.model.lm_head.weight"


def make_served(
    model_id, width=16, *, modules=(Q, UP), folder="folder", vocab=7, revision=None, served_as=""
):
    """A base model whose modules have `width` inputs and twice as many outputs."""
    tensors = {"lm_head.weight": BaseTensor("F32", (vocab, width), "d")}
    places = {name: (width, 2 * width) for name in modules}
    path = Path("/models") / folder
    revision = revision or f"of {model_id}"
    return BaseModel(model_id, path, {}, places, revision, tensors=tensors, served_as=served_as)


def make_header(width=16, *, modules=(Q,), others=None):
    shapes = dict(others or {})
    for module in modules:
        shapes |= dict(zip(lora_names(module), [(4, width), (2 * width, 4)], strict=True))
    return Header({name: TensorInfo("F32", shape, 0, 0) for name, shape in shapes.items()}, {})


SMALL, WIDE = make_served("org/Small", folder="small-hf"), make_served("org/Wide", 32)
TWIN = make_served("org/Twin", vocab=9)
QUANTISED = make_served("org/Other-AWQ")
EXPERTS = make_served("org/Experts", modules=(Q,))
AGAIN = make_served("small-too", folder="small-hf", revision=SMALL.base_revision)
INT8 = replace(AGAIN, model_id="small-int8", served_as="int8")
CHOICES = {
    "by name": ([SMALL, TWIN], "org/Twin", make_header(), TWIN),
    "by name in another case": ([SMALL, TWIN], "Other/TWIN", make_header(), TWIN),
    "by the whole id": ([SMALL, make_served("one")], "one", make_header(), make_served("one")),
    "by its folder": ([SMALL, TWIN], "/home/me/small-hf/", make_header(), SMALL),
    "by width": ([SMALL, WIDE], None, make_header(32), WIDE),
    "by width under an unknown name": ([SMALL, WIDE], "org/Tuned", make_header(), SMALL),
    "by modules": ([SMALL, EXPERTS], None, make_header(modules=(Q, UP)), SMALL),
    "by a copy": ([SMALL, TWIN], None, make_header(others={HEAD_COPY: (9, 16)}), TWIN),
    "by a copy with added tokens": (
        [SMALL, WIDE], None, make_header(others={HEAD_COPY: (71, 16)}), SMALL,
    ),
    "by width within a name": (
        [make_served("a/x"), make_served("b/x", 32), WIDE], "x", make_header(),
        make_served("a/x"),
    ),
    "by name, and the checks say why it does not fit": (
        [SMALL, WIDE], "org/Wide", make_header(8), WIDE,
    ),
    "by shape, though the config names another": (
        [SMALL, WIDE], "org/Small", make_header(32), WIDE,
    ),
    "by the name of its quantised weights": (
        [SMALL, TWIN], "unsloth/twin-unsloth-bnb-4bit", make_header(), TWIN,
    ),
    "by the name of the weights that were quantised": (
        [SMALL, QUANTISED], "org/other", make_header(), QUANTISED,
    ),
    "by the whole name rather than the plain one": (
        [make_served("other"), QUANTISED], "org/Other-AWQ", make_header(), QUANTISED,
    ),
    "one variant under two names": ([AGAIN, SMALL, WIDE], "Small-HF", make_header(), AGAIN),
    "by its name among equal weights": ([SMALL, INT8], "small-int8", make_header(), INT8),
}  # fmt: skip


@pytest.mark.parametrize("case", CHOICES)
def test_the_config_and_the_tensors_choose(case):
    served, trained_on, header, chosen = CHOICES[case]
    assert choose(served, trained_on, header) == chosen


UNCLEAR = {
    "several fit": ([SMALL, TWIN], None, make_header(), "names none.* for org/Small, org/Twin"),
    "a strange name": ([SMALL, TWIN], "org/X", make_header(), "'org/X'.* for org/Small, org/Twin"),
    "one revision in two variants": (
        [SMALL, INT8, WIDE], "small-hf", make_header(),
        "'small-hf'.* for org/Small, small-int8;",
    ),
    "none fits": ([SMALL, WIDE], "org/X", make_header(8), "fits none of org/Small, org/Wide"),
    "the named does not fit, others do": (
        [SMALL, WIDE, make_served("org/Wider", 32)], "org/Small", make_header(32),
        "'org/Small'.* could be for org/Wide, org/Wider",
    ),
    "several of one name": (
        [make_served("a/x"), make_served("b/x"), SMALL], "x", make_header(),
        "'x'.* could be for a/x, b/x;",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNCLEAR)
def test_an_unclear_base_model_is_asked_for(case):
    served, trained_on, header, said = UNCLEAR[case]
    with refused("base_model_unclear", match=said, param="base_model") as caught:
        choose(served, trained_on, header)
    assert "name its base model with base_model" in str(caught.value)


def test_a_single_candidate_is_chosen_without_reading_the_files():
    assert choose_base([SMALL], b"no JSON", io.BytesIO(b"no tensors"), AdapterLimits()) == SMALL


def test_files_choose_among_several_candidates(base):
    files = make_config(base_model_name_or_path="x"), io.BytesIO(encode(make_adapter(base)))
    assert choose_base([WIDE, base], *files, AdapterLimits()) is base
    with refused("pickle_refused"):
        choose_base([WIDE, base], files[0], io.BytesIO(b"\x80\x02pickle"), AdapterLimits())


NAMES = st.sampled_from(["a", "b", "org/a", "org/b", "other/A"])
MODULES = st.sets(st.sampled_from([Q, UP]), min_size=1)
WIDTHS = st.sampled_from([8, 16])


@given(
    st.lists(st.tuples(NAMES, WIDTHS, MODULES), min_size=2, max_size=4, unique_by=lambda b: b[0]),
    st.none() | NAMES,
    st.tuples(WIDTHS, MODULES),
)
def test_a_base_that_does_not_fit_is_never_chosen_while_another_fits(made, trained_on, adapter):
    served = [make_served(name, width, modules=modules) for name, width, modules in made]
    header = make_header(adapter[0], modules=adapter[1])
    fitting = [base for base in served if fits(base, header)]
    chosen = None
    with suppress(InvalidAdapter):
        chosen = choose(served, trained_on, header)
    assert chosen is None or chosen in fitting or not fitting
    if len(fitting) == 1 and trained_on is None:
        assert chosen is fitting[0]
