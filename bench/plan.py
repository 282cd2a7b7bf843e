"""`python -m bench.plan`: what `chorale plan` predicts of this machine, beside what is measured.

Each row is a run of the engine with random weights of SmolLM2-135M's shape, on one thread and
without drafts. Before and after a run `engine.cpu.rates` measures the parts of a step (products by
number of rows, attention, adapters, norms, sampling), and `server.capacity` predicts the run from
these rates and the scheduler's rules alone. No coefficient is fitted to a run, of this benchmark or
of another one. The time of a step without a model is that of `server.capacity.steps`.

Times are processor seconds of the engine, since this machine has other work. A figure is the median
of rounds, in which all rows take turns; `ratio` is predicted / measured.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from bench.checkpoint import RANKS, THREADS, Checkpoint, make_checkpoint
from bench.engine.loaded import LoadedEngine, loaded_engine
from bench.measurement import Figures, Measurement, Row, in_turns, main
from bench.report import ratio, rounded
from bench.session import ProcessorClock
from bench.workload import BenchRequest, Lengths, make_requests
from engine.cpu.rates import measure_rates
from server.capacity.arena import default_limits
from server.capacity.engine_plan import EnginePlan
from server.capacity.hardware import Hardware
from server.capacity.replay import Replay
from server.capacity.sizes import Quantization, parse_sizes
from server.capacity.steps import measured_speed
from server.capacity.traffic import Request, Traffic

_ADAPTERS = 16
_MACHINE = Hardware("this machine", "cpu", 1 << 40, 1.0, 1.0, 1.0, 0.0)
_WITHIN = (0.8, 1.25)

Pair = tuple[Figures, Figures]
"""The figures of a run: predicted, measured."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run.   rate: requests a second; None if all come at once."""

    precision: str
    adapters: int = 0
    requests: int = 8
    rate: float | None = None
    prompt_tokens: str = "64:256"
    output_tokens: str = "24"

    @property
    def quantization(self) -> Quantization:
        return "int8" if self.precision == "int8" else "float"

    def make_requests(self, checkpoint: Checkpoint) -> list[BenchRequest]:
        return make_requests(
            checkpoint.base_model, tuple(islice(checkpoint.adapters, self.adapters)),
            checkpoint.vocab_size, self.requests, self.prompt_tokens, self.output_tokens,
            rate=self.rate or float("inf"),
        )  # fmt: skip


def _cases() -> Iterator[Case]:
    for precision, rate in (("float32", 0.4), ("int8", 0.8)):
        for adapters in (0, _ADAPTERS):
            alike = Case(precision=precision, adapters=adapters)
            for requests in (1, 4, 8, 16):
                yield replace(alike, requests=requests)
            yield replace(alike, rate=rate)
        yield Case(precision=precision, requests=2, prompt_tokens="700:1000")


@dataclass(frozen=True, kw_only=True)
class Plans(Measurement):
    """Predictions beside measurements.   runs: the number of runs, the first of all."""

    told_apart: ClassVar = ("precision", "adapters", "requests", "rate", "prompt_tokens", "model")

    stack: str = "smollm2-135m"
    runs: int = 22
    repeats: int = 3

    def rows(self, bench: str, folder: Path) -> Iterator[Row]:
        checkpoint = make_checkpoint(self.stack, folder / "checkpoint", _ADAPTERS)
        planner, cases = _Planner(checkpoint), list(islice(_cases(), self.runs))
        engines: dict[tuple[str, int], LoadedEngine] = {}
        with ExitStack() as stack:
            for case in cases:
                key = case.precision, case.adapters
                if key not in engines:
                    own = folder / f"{case.precision}-{case.adapters}"
                    own.mkdir()
                    some = dict(islice(checkpoint.adapters.items(), case.adapters))
                    loading = loaded_engine(
                        replace(checkpoint, adapters=some),
                        own,
                        case.precision,
                        cpu_kernels="native",
                    )
                    engines[key] = stack.enter_context(loading)
            sides = [
                partial(planner.beside, case, engines[case.precision, case.adapters])
                for case in cases
            ]
            for case, rounds in zip(cases, in_turns(self.repeats, *sides), strict=True):
                setup = {**asdict(case), "model": self.stack, "threads": THREADS}
                setup |= {"rate": case.rate or "inf", "repeats": self.repeats}
                yield bench, setup, _result(rounds)


def _result(rounds: Sequence[Pair]) -> Figures:
    """Return the median of each figure, predicted and measured."""
    result: Figures = {}
    for name in rounds[0][1]:
        predicted, measured = (
            median(side[name] for side in sides) for sides in zip(*rounds, strict=True)
        )
        result[name] = {
            "predicted": rounded(predicted),
            "measured": rounded(measured),
            "ratio": ratio(predicted, measured),
        }
    low, high = _WITHIN
    result["within"] = all(low <= figure["ratio"] <= high for figure in result.values())
    return result


class _Planner:
    """Predicts runs from rates that are measured beside them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._config = json.loads((checkpoint.model_dir / "config.json").read_text())
        self._sizes = parse_sizes(self._config, checkpoint.base_model)
        self._names = {name: number for number, name in enumerate(checkpoint.adapters)}
        self._newest: tuple[Quantization | None, Mapping[str, Any]] = (None, {})

    def beside(self, case: Case, engine: LoadedEngine) -> Pair:
        """Measure rates, a run, and rates again; predict the run from both."""
        requests = case.make_requests(self._checkpoint)
        # What was measured after the last run was measured just before this one.
        if self._newest[0] != case.quantization:
            self._newest = case.quantization, self._rates(case.quantization)
        before = self._predict(case, requests, self._newest[1])
        measured = _measure(engine, requests)
        self._newest = case.quantization, self._rates(case.quantization)
        after = self._predict(case, requests, self._newest[1])
        return {name: (before[name] + after[name]) / 2 for name in measured}, measured

    def _rates(self, quantization: Quantization) -> Mapping[str, Any]:
        name = None if quantization == "float" else quantization
        rates: Mapping[str, Any] = measure_rates(self._config, [name], THREADS)["rates"]
        return rates[quantization]

    def _predict(
        self, case: Case, requests: Sequence[BenchRequest], rates: Mapping[str, Any]
    ) -> Figures:
        lengths = Lengths.parse(case.prompt_tokens), Lengths.parse(case.output_tokens)
        plan = EnginePlan(
            self._sizes, _MACHINE, case.quantization, THREADS, default_limits("cpu"),
            Traffic(*lengths, case.adapters, RANKS), lambda _: measured_speed(rates),
        )  # fmt: skip
        replayed = Replay(plan.times, plan.seats, [self._request(r) for r in requests]).run()
        num_output = sum(r.request.num_output for r in replayed.served)
        return {
            "output_tokens_per_cpu_s": num_output / replayed.busy_s,
            "ttft_ms_p50": 1000 * replayed.ttft_s(0.5),
            "tpot_ms_p50": 1000 * replayed.tpot_s(0.5),
        }

    def _request(self, request: BenchRequest) -> Request:
        adapter = self._names.get(request.model)
        rank = 0 if adapter is None else RANKS[adapter % len(RANKS)]
        num_prompt = len(request.prompt_token_ids)
        return Request(num_prompt, request.max_tokens, adapter, rank, request.due_s)


def _measure(engine: LoadedEngine, requests: Sequence[BenchRequest]) -> Figures:
    begun_s = time.process_time()
    outcomes = engine.serve(requests, ProcessorClock())
    cpu_s = time.process_time() - begun_s
    assert not any(outcome.error for outcome in outcomes)
    return {
        "output_tokens_per_cpu_s": sum(len(o.token_ids) for o in outcomes) / cpu_s,
        "ttft_ms_p50": 1000 * median(o.ttft_s for o in outcomes),
        "tpot_ms_p50": 1000 * median(o.tpot_s for o in outcomes),
    }


if __name__ == "__main__":
    main("bench.plan", {"plan.engine": Plans()}, __doc__)
