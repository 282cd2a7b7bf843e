"""Every answer that ends by itself fits what its request demands, whatever the model, its
temperature, other requests and other parameters; an answer that is cut is a beginning of one.
"""

import json
import math
import re
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from itertools import product
from pathlib import Path

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from engine.grammar.llguidance_matcher import LlguidanceGrammars
from engine.models.weights import load_config
from registry.errors import Invalid
from server.constraints.constraint import Constraint
from server.constraints.grammar import compiled
from server.text.vocabulary import read_vocabulary
from tests import needs
from tests.engine.cpu_kernels import kernels_of
from tests.engine.fakes import make_message, run_until_idle, tokens_of
from tests.engine.real_core import build_core
from tests.tiny_models import save_model

DEMO = Path(__file__).parents[2] / "demo" / "model"
BYTES = LLTokenizer("byte")
ARITHMETIC = """start: value (("+" | "*") value){0,2}
value: /[1-9][0-9]{0,2}/ | "(" start ")" """
number, size, most = st.integers(-9, 99), st.integers(0, 3), st.integers(3, 6)
name = st.sampled_from(["a", "b c", "é", "1"])
fields = st.fixed_dictionaries
leaves = st.one_of(
    fields({"type": st.just("integer"), "minimum": number, "maximum": st.integers(99, 3000)}),
    fields({"exclusiveMinimum": number, "type": st.just("number"), "maximum": st.just(200.5),
            "multipleOf": st.sampled_from([0.25, 3])}),
    fields({"type": st.just("string"), "maxLength": most}, optional={"minLength": size,
            "pattern": st.sampled_from([r"^[a-z]+\d$", "b", r"^(ab|\w\s){1,2}$", "[^a]"])}),
    fields({"type": st.just("string"), "maxLength": st.just(36), "format": st.sampled_from(
        ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"])}),
    fields({"enum": st.lists(name | number | st.just([{"a": None}]), min_size=1)}),
)  # fmt: skip


def larger(inner):
    """Schemas of objects, lists and combinations of these schemas."""
    some, others = st.lists(inner, min_size=1, max_size=2), st.booleans() | inner
    properties = {"properties": st.dictionaries(name, inner, max_size=3)}
    return st.one_of(
        fields({"type": st.just("object"), "additionalProperties": others}, optional={
            "maxProperties": most, "minProperties": size}),
        fields({"type": st.just("object"), "additionalProperties": others, **properties},
               optional={"required": st.lists(name, max_size=2, unique=True)}),
        fields({"type": st.just("array"), "items": inner, "maxItems": most}, optional={
            "minItems": size, "prefixItems": some}),
        fields({"anyOf": some}), fields({"allOf": some}), fields({"oneOf": some}),
    )  # fmt: skip


expression = st.recursive(
    st.sampled_from(["a", "é", "[^x-z]", r"\d", r"\w", r"\s", ".", r"\."]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=4).map("".join),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("(?:{}){}".format, inner, st.sampled_from(["?", "{0,3}", "{2}", "+"])),
    ),
)
schema = st.recursive(leaves, larger, max_leaves=6).map(json.dumps)
constraint = st.one_of(
    *3 * [st.tuples(st.just("json"), schema)],
    st.tuples(st.just("regex"), expression),
    st.tuples(st.just("choice"), st.lists(name, min_size=1).map(json.dumps)),
    st.just(("lark", ARITHMETIC)),
)
OTHERS = {"n": 2, "logprobs": 2, "stop": (b"b", b"1}"), "frequency_penalty": 0.5,
          "repetition_penalty": 1.3, "ignore_eos": True}  # fmt: skip
params = fields(
    {"temperature": st.sampled_from([0.0, 0.7, 1.5]), "seed": st.integers(0, 2**32)},
    optional={name: st.just(value) for name, value in OTHERS.items()},
)


def exact(text):
    """A number as it is written; one that is larger than all floats becomes the largest of them."""
    most = sys.float_info.max
    return Decimal(text) if abs(float(text)) <= most else math.copysign(most, float(text))


def has_shape(kind, asked, text):
    if kind == "json":
        validator = jsonschema_rs.Draft202012Validator(json.loads(asked), validate_formats=True)
        # The \s of llguidance, as Unicode's spaces, has U+0085; that of ECMA's patterns has not.
        text = text.replace("\x85", " ")
        return validator.is_valid(json.loads(text, parse_float=exact))
    if kind == "regex":
        return re.fullmatch(asked, text, re.ASCII) is not None
    return text in json.loads(asked) if kind == "choice" else bool(compile(text, "", "eval"))


class World:
    """A core with a model and its tokens.   ends: of answers, by cause."""

    def __init__(self, model_dir, folder, lag=0):
        config, path = load_config(model_dir), model_dir / "tokenizer.json"
        self.eos, self.ends = config["eos_token_id"], Counter()
        self.words = read_vocabulary(json.loads(path.read_text()))
        tokens = self.words, [self.eos], LlguidanceGrammars(path, config["vocab_size"], [self.eos])
        kernels = kernels_of("native")
        self.core = build_core(model_dir, folder, {}, lag=lag, tokens=tokens, make_kernels=kernels)

    def check(self, demands):
        """Check the answers to requests: pairs of a constraint, maybe refused, and parameters."""
        asked = {}
        for number, (constraint, sampling) in enumerate(demands):
            with suppress(Invalid):
                asked[f"r{number}"] = *constraint, compiled(Constraint(*constraint, "s"))
                tenant, grammar = f"t{number % 3}", asked[f"r{number}"][-1]
                message = make_message(f"r{number}", 9, 150, None, tenant, 300, grammar=grammar)
                own = replace(message.sampling_params, **sampling)
                self.core.handle("gw", replace(message, sampling_params=own))
        for request_id, outputs in run_until_idle(self.core, 10**6).items():
            for index in {output.index for output in outputs}:
                answer = [output for output in outputs if output.index == index]
                self._check(*asked[request_id], answer)

    def _check(self, kind, asked, grammar, answer):
        self.ends[answer[-1].stop_cause] += 1
        said = b"".join(self.words[token] for token in tokens_of(answer))
        assert LLMatcher(BYTES, grammar).try_consume_tokens(list(said)) == len(said), (asked, said)
        if answer[-1].stop_cause == "eos":
            assert has_shape(kind, asked, said.decode()), (asked, said)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """A function that returns a model's folder: random weights, the demo's or SmolLM2."""
    folder = save_model(tmp_path_factory.mktemp("m") / "random", vocab_size=2048, eos_token_id=1)
    (folder / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    return lambda kind: {"random": folder, "demo": DEMO}.get(kind) or needs.smollm2()


QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}
LONG = [("random", 0, 60), ("demo", 0, 60), ("demo", 1, 60), ("smollm2", 0, 6), ("smollm2", 1, 6)]
CASES = [("random", 0, 20), ("demo", 1, 20)]
CASES += [pytest.param(*case, marks=pytest.mark.soak) for case in LONG]


@pytest.mark.parametrize(("kind", "lag", "num_examples"), CASES)
def test_an_answer_that_ends_has_its_shape(model_of, tmp_path, kind, lag, num_examples):
    world = World(model_of(kind), tmp_path / "core", lag)

    @settings(max_examples=num_examples, phases=[Phase.generate], **QUIET)
    @given(st.lists(st.tuples(constraint, params), min_size=5, max_size=8))
    def check(demands):
        world.check(demands)

    check()
    print(kind, lag, dict(world.ends))  # noqa: T201
    ended = world.ends["eos"] + world.ends["stop_string"]
    assert ended > 0.6 * world.ends.total()


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "every"), [("random", 1), ("demo", 1), ("smollm2", 6)])
def test_an_answer_that_ends_fits_its_schema_of_the_official_suite(model_of, tmp_path, kind, every):
    world, asked = World(model_of(kind), tmp_path / "core"), []
    for path in sorted(needs.schema_suite(tmp_path).rglob("*.json")):
        asked += [json.dumps(case["schema"]) for case in json.loads(path.read_text())]
    asked = asked[::every]
    for temperature, number in product([0.0, 1.0], range(0, len(asked), 8)):
        sampling = {"temperature": temperature, "seed": number}
        world.check([(("json", text), sampling) for text in asked[number : number + 8]])
    print(kind, dict(world.ends))  # noqa: T201
    # Some schemas bound nothing, and SmolLM2 has more to say than an answer has room for.
    assert world.ends["eos"] > 0.3 * world.ends.total() > 10


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_mask_that_is_left_out_once_would_be_found(model_of, tmp_path, step, monkeypatch):
    world = World(model_of("demo"), tmp_path / "core")
    eager = {"temperature": 0.7, "seed": 3, "logit_bias": ((world.eos, 100.0),)}
    demands = [(("json", '{"type": "string", "minLength": 9, "maxLength": 12}'), eager)]
    world.check(demands)
    assert world.ends["eos"] == 1
    choose, places = world.core.runner.choose, iter(range(99))

    def careless(masks):
        if masks and next(places) == step:
            masks = {row: np.full_like(mask, 255) for row, mask in masks.items()}
        choose(masks)

    monkeypatch.setattr(world.core.runner, "choose", careless)
    with pytest.raises((AssertionError, ValueError)):
        world.check(demands)
