"""Measurements of structured output at a tiny size, and the answers that they ask for."""

import json
from itertools import islice

from pydantic_core import from_json
from tokenizers import Tokenizer

from bench.experiment import row
from bench.grammar.phases import LISTS, Phases, endless
from bench.grammar.schemas import Schemas
from bench.in_process import EngineFactory
from bench.session import run


def test_constrained_answers_are_beginnings_of_json_that_fill_their_room(tmp_path) -> None:
    factory = EngineFactory("demo", tmp_path)
    asks = list(islice(endless(factory, 40, 100, LISTS, "good"), 12))
    outcomes = run(factory.make(arena_tokens=2048, max_model_len=256), asks)
    decode = Tokenizer.from_file(str(factory.model_dir / "tokenizer.json")).decode
    for ask, outcome in zip(asks, outcomes, strict=True):
        assert len(outcome.token_ids) == ask.max_tokens
        assert isinstance(from_json(decode(outcome.token_ids), allow_partial=True), list)


def test_a_phase_is_compared_with_the_first_and_every_schema_has_masks() -> None:
    tiny = Phases(stack="demo", phases=((0, ""), (100, "bombs")), repeats=1, steps=30)
    free, bombs = json.loads(row("grammar.test", tiny))["result"].values()
    assert (free["forced_share"], free["rows"], set(free["to_first"].values())) == (0, 8, {1})
    assert bombs["rows"] > 8
    assert bombs["chosen_per_cpu_s"] < bombs["tokens_per_cpu_s"]
    schemas = json.loads(row("grammar.test", Schemas(stack="demo", masks=9)))["result"]
    assert all(0 < figures["p50"] <= figures["max_ms"] for figures in schemas.values())
