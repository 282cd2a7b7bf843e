"""`python -m bench.grammar`: structured output beside free answers, in one engine with SmolLM2 of
`make model`.
"""

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from typing import Any

from tokenizers import Tokenizer

from bench.in_process import EngineFactory, EngineMeasurement
from bench.measurement import Figures, in_turns, main
from bench.outcome import gaps_between
from bench.report import percentiles_ms, ratio, rounded
from bench.session import Ask, Session
from bench.step_log import StepLog
from engine.core import EngineCore
from server.constraints.constraint import Constraint
from server.constraints.grammar import compiled


def json_grammar(schema: dict[str, Any]) -> str:
    """Compile a schema as gateways do. Raises Invalid if they refuse it."""
    return compiled(Constraint("json", json.dumps(schema), "schema"))


def object_of(properties: dict[str, Any]) -> dict[str, Any]:
    demands = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **demands}


_TEXT, _NUMBER = {"type": "string", "maxLength": 40}, {"type": "integer"}
_STATUS, _TAGS = {"enum": ["open", "sent"]}, {"type": "array", "items": _TEXT, "maxItems": 4}
_ITEMS = {
    "people": object_of({"name": _TEXT, "age": _NUMBER, "tags": _TAGS}),
    "cities": object_of({"city": _TEXT, "is_capital": {"type": "boolean"}, "districts": _TAGS}),
    "orders": object_of({"order": _NUMBER, "status": _STATUS, "comment": _TEXT}),
}
_LISTS = [json_grammar({"type": "array", "items": i, "minItems": 1000}) for i in _ITEMS.values()]
_REQUESTS = 8  # that run at any time
_COMPARED = ("tokens_per_cpu_s", "chosen_per_cpu_s", "step_cpu_ms", "itl_p50_ms", "itl_p99_ms")


@dataclass(frozen=True, kw_only=True)
class Shares(EngineMeasurement):
    """Phases in turn on one engine; medians over `repeats` rounds count. The bound is free answers.

    shares: per cent of requests that a JSON schema constrains, phase by phase; `to_first` is the
    ratio to the first phase.   steps: of a phase.
    """

    stack: str = "smollm2"
    shares: tuple[int, ...] = (0, 20, 80, 100)
    repeats: int = 5
    steps: int = 250
    output_tokens: int = 256

    def run(self, factory: EngineFactory) -> Figures:
        core = factory.make(arena_tokens=8192, max_model_len=512, prefix_caching=False)
        phase = partial(self._phase, factory, core, StepLog.of(core))
        phase(100)  # compiles the grammars
        phases = in_turns(self.repeats, *(partial(phase, share) for share in self.shares))
        result, first = dict[str, Any](), dict[str, float]()
        for share, runs in zip(self.shares, phases, strict=True):
            figures = {key: rounded(median(run[key] for run in runs)) for key in runs[0]}
            first = first or figures
            to_first = {key: ratio(figures[key], first[key]) for key in _COMPARED}
            result[str(share)] = figures | {"to_first": to_first}
        return result

    def _phase(
        self, factory: EngineFactory, core: EngineCore, log: StepLog, share: int
    ) -> dict[str, float]:
        session, asks = Session(core), self._endless(factory, share)

        def step() -> None:
            while session.num_open < _REQUESTS:
                session.send(next(asks))
            session.step()

        step()
        while not all(map(session.num_tokens, range(_REQUESTS))):
            step()
        before, step_s, num_rows = core.take_stats(), list[float](), list[int]()
        start_s, cpu_begun_s = session.now_s(), time.process_time()
        for _ in range(self.steps):
            begun_s = time.thread_time()
            step()
            seconds, rows = time.thread_time() - begun_s, log.last.rows
            num_rows.append(len(rows))
            if len(rows) == _REQUESTS and all(row.num_output_tokens for row in rows):  # no prompt
                step_s.append(seconds)
        cpu_s, end_s, now = time.process_time() - cpu_begun_s, session.now_s(), core.take_stats()
        num_tokens = now.completion_tokens - before.completion_tokens
        num_forced = now.grammars.forced_tokens - before.grammars.forced_tokens
        session.stop()
        itl_ms = percentiles_ms(gaps_between(session.outcomes(), start_s, end_s))
        return {
            "tokens_per_cpu_s": num_tokens / cpu_s,
            "chosen_per_cpu_s": (num_tokens - num_forced) / cpu_s,
            "step_cpu_ms": median(step_s) * 1000,
            "rows": mean(num_rows),
            **{f"itl_{name}_ms": ms or 0.0 for name, ms in itl_ms.items()},
            "forced_share": num_forced / num_tokens,
            "masks_late": now.grammars.masks_late - before.grammars.masks_late,
        }

    def _endless(self, factory: EngineFactory, share: int) -> Iterator[Ask]:
        """Make requests; the first answers are short, and so apart."""
        tokenizer = Tokenizer.from_file(str(factory.model_dir / "tokenizer.json"))
        subjects = [*_ITEMS]
        for number in itertools.count():
            text = f"A list of {subjects[number % len(subjects)]} in JSON; number {number}:\n"
            is_constrained = (number + 1) * share // 100 > number * share // 100
            grammar = _LISTS[number % len(_LISTS)] if is_constrained else ""
            room = self.output_tokens * min(number + 1, _REQUESTS) // _REQUESTS
            yield Ask(tuple(tokenizer.encode(text).ids), room, grammar=grammar)


if __name__ == "__main__":
    main("bench.grammar", {"grammar.shares": Shares()}, __doc__)
