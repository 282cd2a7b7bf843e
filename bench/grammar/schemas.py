"""Processor time to compile schemas by their size, and of masks on random walks through them."""

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from bench.experiment import Experiment
from bench.in_process import EngineFactory
from bench.report import percentiles_ms, rounded
from engine.grammar.llguidance_matcher import LlguidanceGrammars
from server.shapes.grammar import compiled
from server.shapes.shape import Shape

_KINDS: tuple[dict[str, Any], ...] = ({"type": "string", "maxLength": 8}, {"enum": ["yes", "no"]})
_EOS_TOKEN_ID = 0


def json_grammar(schema: dict[str, Any]) -> str:
    """Compile a schema as gateways do. Raises Invalid if they refuse it."""
    return compiled(Shape("json", json.dumps(schema), "schema"))


def object_of(properties: dict[str, Any]) -> dict[str, Any]:
    demands = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **demands}


@dataclass(frozen=True, kw_only=True)
class Schemas(Experiment):
    """Compilations and masks of schemas of several kinds.   masks: how many of each."""

    stack: str = "smollm2"
    masks: int = 2000

    def measure(self, factory: EngineFactory) -> dict[str, Any]:
        path = factory.model_dir / "tokenizer.json"
        grammars = LlguidanceGrammars(path, factory.vocab_size, (_EOS_TOKEN_ID,))
        grammars.compile(json_grammar({}))  # builds the table of tokens
        return {name: self._figures(grammars, json_grammar(schema)) for name, schema in _schemas()}

    def _figures(self, grammars: LlguidanceGrammars, text: str) -> dict[str, Any]:
        stream, mask_s, begun = random.Random(0), list[float](), time.thread_time()
        start = grammars.compile(text)
        compile_s, matcher = time.thread_time() - begun, start.fork()
        while len(mask_s) < self.masks:
            begun = time.thread_time()
            mask = matcher.mask()
            mask_s.append(time.thread_time() - begun)
            token_id = int(stream.choice(np.unpackbits(mask, bitorder="little").nonzero()[0]))
            if token_id != _EOS_TOKEN_ID:
                matcher.consume([token_id])
            else:
                matcher = start.fork()
        seconds = {"compile_ms": compile_s, "first_ms": mask_s[0], "max_ms": max(mask_s)}
        return {name: rounded(1000 * s) for name, s in seconds.items()} | percentiles_ms(mask_s)


def _schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    for num in (1, 10, 100, 500, 1000):
        properties = {f"property_{i}": _KINDS[i % len(_KINDS)] for i in range(num)}
        if num <= 500:  # a required name counts twice among the 1,000 that a schema may have
            yield f"required_{num}", object_of(properties)
        yield f"optional_{num}", object_of(properties) | {"required": []}
    for num in (10, 100, 1000):
        yield f"enum_{num}", {"enum": [f"value {i}" for i in range(num)]}
    for depth in (8, 16, 32):
        yield f"nest_{depth}", reduce(lambda s, _: object_of({"inner": s}), range(depth), _KINDS[0])
