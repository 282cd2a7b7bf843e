"""Costs of constrained answers, and of another tenant's; the bound is free ones instead."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from typing import Any

from tokenizers import Tokenizer

from bench.adapters.step_log import StepLog
from bench.experiment import Experiment
from bench.grammar.schemas import json_grammar, object_of
from bench.in_process import EngineFactory
from bench.report import percentiles_ms, ratio, rounded
from bench.scheduling.chunked_prefill import gaps_between
from bench.session import Ask, Session
from engine.core import EngineCore
from server.shapes.grammar import compiled
from server.shapes.shape import Shape

_TEXT, _NUMBER = {"type": "string", "maxLength": 40}, {"type": "integer"}
_STATUS, _TAGS = {"enum": ["open", "sent"]}, {"type": "array", "items": _TEXT, "maxItems": 4}
_ITEMS = {
    "people": object_of({"name": _TEXT, "age": _NUMBER, "tags": _TAGS}),
    "cities": object_of({"city": _TEXT, "is_capital": {"type": "boolean"}, "districts": _TAGS}),
    "orders": object_of({"order": _NUMBER, "status": _STATUS, "comment": _TEXT}),
}
LISTS = [json_grammar({"type": "array", "items": i, "minItems": 1000}) for i in _ITEMS.values()]
_LARKS = 'start: s\ns: s s | "a" | "b"', "start: s\ns: s s s | s s | /[a-z]/"
_REGEXES = ".*a.{30}", "(.*a.{10}b.*){3}"
_AMBIGUOUS = {f"t{i}": {"type": "array", "items": {"$ref": "#"}} for i in range(100)}
_SCHEMA = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in _AMBIGUOUS] + [_NUMBER]}
BOMBS = [compiled(Shape("lark", text, "bomb")) for text in _LARKS]
BOMBS += [compiled(Shape("regex", text, "bomb")) for text in _REGEXES]
BOMBS += [json_grammar(_SCHEMA | {"$defs": _AMBIGUOUS})]
"""The costliest grammars that gateways accept, and the costliest schema that was found."""
_GOOD, _OTHERS = 8, 2  # requests that run at any time
_COMPARED = ("tokens_per_cpu_s", "chosen_per_cpu_s", "step_cpu_ms", "itl_p50_ms", "itl_p99_ms")


@dataclass(frozen=True, kw_only=True)
class Phases(Experiment):
    """Phases in turn on one engine; medians over `repeats` rounds count.

    phases: per cent of requests that are constrained, and another tenant's: "free", "bombs" or "".
    """

    stack: str = "smollm2"
    phases: tuple[tuple[int, str], ...]
    repeats: int = 5
    steps: int = 250
    output_tokens: int = 256

    def measure(self, factory: EngineFactory) -> dict[str, Any]:
        core = factory.make(arena_tokens=8192, max_model_len=512, prefix_caching=False)
        run = partial(self._run, factory, core, StepLog.of(core))
        run(100, "")  # compiles the grammars
        rounds = [[run(*phase) for phase in self.phases] for _ in range(self.repeats)]
        result, first = dict[str, Any](), dict[str, float]()
        for (share, beside), runs in zip(self.phases, zip(*rounds, strict=True), strict=True):
            figures = {key: rounded(median(run[key] for run in runs)) for key in runs[0]}
            first = first or figures
            to_first = {key: ratio(figures[key], first[key]) for key in _COMPARED}
            result[f"{share} {beside}".strip()] = figures | {"to_first": to_first}
        return result

    def _run(
        self, factory: EngineFactory, core: EngineCore, log: StepLog, share: int, beside: str
    ) -> dict[str, float]:
        session, good, others = Session(core), list[int](), list[int]()
        make, bombs = partial(endless, factory, self.output_tokens), 100 * (beside == "bombs")
        crowds = [(_GOOD, good, make(share, LISTS, "good"))]
        crowds += [(_OTHERS, others, make(bombs, BOMBS, "other"))] if beside else []

        def step() -> None:
            for size, sent, asks in crowds:
                while sum(map(session.is_open, sent)) < size:
                    sent.append(session.send(next(asks)))
            session.step()

        while not (good and all(map(session.num_tokens, good[:_GOOD]))):
            step()
        before, step_s, num_rows = core.take_stats(), list[float](), list[int]()
        start_s, cpu_begun_s = session.now_s(), time.process_time()
        for _ in range(self.steps):
            begun_s = time.thread_time()
            step()
            seconds, rows = time.thread_time() - begun_s, log.last.rows
            num_rows.append(len(rows))
            num_good = sum(int(row.request_id) in good for row in rows)
            if num_good == _GOOD and all(row.num_output_tokens for row in rows):  # no prompt
                step_s.append(seconds)
        cpu_s, end_s, now = time.process_time() - cpu_begun_s, session.now_s(), core.take_stats()
        num_tokens = now.completion_tokens - before.completion_tokens
        num_forced = now.grammars.forced_tokens - before.grammars.forced_tokens
        session.stop()
        said, ends = session.outcomes(), [session.outcomes()[i].error for i in others]
        itl_ms = percentiles_ms(gaps_between((said[i] for i in good), start_s, end_s))
        return {
            "tokens_per_cpu_s": num_tokens / cpu_s,
            "chosen_per_cpu_s": (num_tokens - num_forced) / cpu_s,
            "step_cpu_ms": median(step_s) * 1000,
            "rows": mean(num_rows),
            **{f"itl_{name}_ms": ms or 0.0 for name, ms in itl_ms.items()},
            "forced_share": num_forced / num_tokens,
            "masks_late": now.grammars.masks_late - before.grammars.masks_late,
            "others_by_length": ends.count(None),
            "others_failed": len(ends) - ends.count(None) - ends.count("abort"),
        }


def endless(
    factory: EngineFactory, max_tokens: int, share: int, grammars: Sequence[str], tenant_id: str
) -> Iterator[Ask]:
    """Make requests, `share` per cent with a grammar; the first answers are short, and so apart."""
    tokenizer, subjects = Tokenizer.from_file(str(factory.model_dir / "tokenizer.json")), [*_ITEMS]
    for number in itertools.count():
        text = f"A list of {subjects[number % len(subjects)]} in JSON; number {number}:\n"
        is_constrained = (number + 1) * share // 100 > number * share // 100
        grammar = grammars[number % len(grammars)] if is_constrained else ""
        room = max_tokens * min(number + 1, 8) // 8
        yield Ask(tuple(tokenizer.encode(text).ids), room, tenant_id=tenant_id, grammar=grammar)
