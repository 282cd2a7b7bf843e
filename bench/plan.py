"""`python -m bench.plan`: what `chorale plan` predicts of this machine, beside what is measured.

Each row is a run of the engine as in `bench.engine`, or of the whole product as in `bench.serve`,
with random weights of SmolLM2-135M's shape, on one thread and without drafts. Before and after a
run `engine.cpu.rates` measures the parts of a step (products by number of rows, attention,
adapters, norms, sampling), and `server.capacity` predicts the run from these rates and the
scheduler's rules alone. No coefficient is fitted to a run, of this benchmark or of another one. The
time of a step without a model is that of `server.capacity.steps`.

Times of rows `plan.engine` are processor seconds of the engine, since this machine has other work;
those of `plan.serve` are the client's. A figure is the median of `--repeats` rounds, in which all
rows take turns; `ratio` is predicted / measured. Ctrl-C ends the rounds early.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import transformers

from bench import process_tree
from bench.checkpoint import Checkpoint, make_checkpoint
from bench.engine.chorale import Chorale
from bench.outcome import Outcome
from bench.peers.peer import Server, Setting
from bench.report import describe_machine, json_line, ratio, rounded
from bench.serve import ARENA_BYTES, Serve
from bench.workload import BenchRequest, Lengths, Workload, make_requests
from engine.cpu.rates import measure_rates
from server.capacity.arena import Limits, default_limits
from server.capacity.engine_plan import EnginePlan
from server.capacity.hardware import Hardware
from server.capacity.replay import Replay, Replayed
from server.capacity.sizes import ModelSizes, Quantization, parse_sizes
from server.capacity.steps import measured_speed
from server.capacity.traffic import Request, Traffic

_RANKS = (8, 16)  # of bench.checkpoint's adapters, in turn
_MACHINE = Hardware("this machine", "cpu", 1 << 40, 1.0, 1.0, 1.0, 0.0)
_WITHIN = (0.8, 1.25)

Figures = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run.   rate: requests a second; None if all come at once."""

    precision: str = "float32"
    adapters: int = 0
    requests: int = 8
    rate: float | None = None
    prompt_tokens: str = "64:256"
    output_tokens: str = "24"

    @property
    def quantization(self) -> Quantization:
        return "int8" if self.precision == "int8" else "float"


def cases() -> Iterator[Case]:
    """The runs of the engine."""
    for precision, rate in (("float32", 0.4), ("int8", 0.8)):
        for adapters in (0, 16):
            alike = Case(precision=precision, adapters=adapters)
            for requests in (1, 4, 8, 16):
                yield replace(alike, requests=requests)
            yield replace(alike, rate=rate)
        yield Case(precision=precision, requests=2, prompt_tokens="700:1000")


SERVED = (Case(adapters=16), Case(adapters=16, rate=0.4))
"""The runs of the whole product."""


def main() -> None:
    options = parse_options(sys.argv[1:])
    lines = []
    for bench, setup, result in run(options):
        lines.append(json_line(bench, describe_machine(), setup, result) + "\n")
        sys.stdout.write(lines[-1])
        sys.stdout.flush()
    within = sum(json.loads(line)["result"]["within"] for line in lines)
    sys.stderr.write(f"{within} of {len(lines)} rows have all ratios in {_WITHIN}\n")
    if options.out:
        options.out.write_text("".join(lines))


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.plan", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--stack", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; medians are the rows")
    parser.add_argument("--first", type=int, help="only so many runs of the engine")
    parser.add_argument("--no-serve", action="store_true", help="without the whole product")
    parser.add_argument("--out", type=Path, help="file for the rows, which is written anew")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield rows (bench, setup, result) after the last round."""
    transformers.utils.logging.disable_progress_bar()
    planned = list(islice(cases(), options.first))
    served = [] if options.no_serve else list(SERVED)
    told: dict[Case, list[tuple[Figures, Figures]]] = {case: [] for case in planned}
    told_served: dict[Case, list[tuple[Figures, Figures]]] = {case: [] for case in served}
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary, ExitStack() as stack:
        folder = Path(temporary)
        checkpoint = make_checkpoint(options.stack, folder / "checkpoint", 16)
        machine = _Machine(checkpoint)
        servers: dict[tuple[str, int], Server] = {}
        for case in planned:
            if (case.precision, case.adapters) not in servers:
                servers[case.precision, case.adapters] = stack.enter_context(
                    _engine(checkpoint, case, folder)
                )
        with suppress(KeyboardInterrupt):  # what was measured counts
            for number in range(options.repeats):
                for case in planned:
                    requests = _requests(case, checkpoint, seed=number)
                    server = servers[case.precision, case.adapters]
                    told[case].append(
                        machine.beside(case, requests, partial(_serve, server, requests))
                    )
                for case in served:
                    serve = _serving(options.stack, case, seed=number)
                    requests = serve.make_requests(checkpoint)
                    told_served[case].append(
                        machine.beside(case, requests, partial(_serve_whole, serve))
                    )
    for bench, rows in (("plan.engine", told), ("plan.serve", told_served)):
        for case, figures in rows.items():
            if not figures:
                continue
            setup = {**asdict(case), "model": options.stack, "threads": 1}
            setup |= {"rate": case.rate or "inf", "repeats": len(figures)}
            yield bench, setup, _result(figures)


def _result(rounds: Sequence[tuple[Figures, Figures]]) -> dict[str, Any]:
    """Medians of each figure, predicted and measured."""
    result: dict[str, Any] = {}
    for name in rounds[0][1]:
        predicted = median(p[name] for p, _ in rounds)
        measured = median(m[name] for _, m in rounds)
        result[name] = {
            "predicted": rounded(predicted),
            "measured": rounded(measured),
            "ratio": ratio(predicted, measured),
        }
    low, high = _WITHIN
    result["within"] = all(low <= figure["ratio"] <= high for figure in result.values())
    return result


# ---- what is predicted ----


class _Machine:
    """Predicts runs from rates that are measured beside them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._config = json.loads((checkpoint.model_dir / "config.json").read_text())
        self._sizes: ModelSizes = parse_sizes(self._config, checkpoint.base_model)
        self._names = {name: number for number, name in enumerate(checkpoint.adapters)}
        self._newest: tuple[Quantization | None, dict[str, Any]] = (None, {})

    def beside(self, case: Case, requests: Sequence[BenchRequest], measure: Any) -> Any:
        """Measure rates, a run, and rates again.   Returns the figures: predicted and measured."""
        quantization = case.quantization
        # What was measured after the last run was measured just before this one.
        if self._newest[0] != quantization:
            self._newest = quantization, self._rates(quantization)
        before = self._predict(case, requests, self._newest[1])
        measured: Figures = measure()
        self._newest = quantization, self._rates(quantization)
        after = self._predict(case, requests, self._newest[1])
        return {name: (before[name] + after[name]) / 2 for name in measured}, measured

    def _rates(self, quantization: Quantization) -> dict[str, Any]:
        name = None if quantization == "float" else quantization
        rates: dict[str, Any] = measure_rates(self._config, [name], 1)["rates"][quantization]
        return rates

    def _predict(
        self, case: Case, requests: Sequence[BenchRequest], rates: Mapping[str, Any]
    ) -> Figures:
        limits: Limits = default_limits("cpu")
        if case in SERVED:
            limits = replace(limits, arena_bytes=ARENA_BYTES)
        lengths = Lengths.parse(case.prompt_tokens), Lengths.parse(case.output_tokens)
        plan = EnginePlan(
            self._sizes, _MACHINE, case.quantization, 1, limits,
            Traffic(*lengths, case.adapters, _RANKS), lambda _: measured_speed(rates),
        )  # fmt: skip
        asked = [self._request(request) for request in requests]
        return _predicted(Replay(plan.times, plan.seats, asked).run())

    def _request(self, request: BenchRequest) -> Request:
        adapter = self._names.get(request.model)
        rank = 0 if adapter is None else _RANKS[adapter % len(_RANKS)]
        num_prompt = len(request.prompt_token_ids)
        return Request(num_prompt, request.max_tokens, adapter, rank, request.due_s)


def _predicted(replayed: Replayed) -> Figures:
    num_output = sum(r.request.num_output for r in replayed.served)
    return {
        "output_tokens_per_cpu_s": num_output / replayed.busy_s,
        "ttft_ms_p50": 1000 * replayed.ttft_s(0.5),
        "tpot_ms_p50": 1000 * replayed.tpot_s(0.5),
    }


# ---- what is measured ----


def _requests(case: Case, checkpoint: Checkpoint, seed: int) -> list[BenchRequest]:
    workload = Workload(
        base_model=checkpoint.base_model,
        models=tuple(islice(checkpoint.adapters, case.adapters)),
        popularity="distinct" if case.adapters else "none",
        rate=case.rate or float("inf"),
        num_requests=case.requests,
        prompt_tokens=Lengths.parse(case.prompt_tokens),
        output_tokens=Lengths.parse(case.output_tokens),
        vocab_size=checkpoint.vocab_size,
        seed=seed,
    )
    return make_requests(workload)


def _engine(checkpoint: Checkpoint, case: Case, folder: Path) -> Any:
    adapters = dict(islice(checkpoint.adapters.items(), case.adapters))
    own = folder / f"{case.precision}-{case.adapters}"
    own.mkdir()
    setting = Setting(
        checkpoint=replace(checkpoint, adapters=adapters),
        precision=case.precision,
        threads=1,
        folder=own,
    )
    return Chorale("native", (case.precision,), in_processor_time=True).serving(setting)


def _serve(server: Server, requests: Sequence[BenchRequest]) -> Figures:
    before_s = process_tree.cpu_seconds(server.pid)
    outcomes = server.serve(requests)
    return _figures(outcomes, process_tree.cpu_seconds(server.pid) - before_s)


def _figures(outcomes: Iterable[Outcome], cpu_s: float) -> Figures:
    good = [outcome for outcome in outcomes if outcome.error is None]
    tpot_s = [(o.chunk_s[-1] - o.chunk_s[0]) / (len(o.token_ids) - 1) for o in good]
    return {
        "output_tokens_per_cpu_s": sum(len(o.token_ids) for o in good) / cpu_s,
        "ttft_ms_p50": 1000 * median(o.ttft_s for o in good),
        "tpot_ms_p50": 1000 * median(tpot_s),
    }


def _serving(stack: str, case: Case, seed: int) -> Serve:
    return Serve(
        stack=stack,
        adapters=case.adapters,
        requests=case.requests,
        rate=case.rate or float("inf"),
        prompt_tokens=case.prompt_tokens,
        output_tokens=case.output_tokens,
        seed=seed,
    )


def _serve_whole(serve: Serve) -> Figures:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        [(_, _, result)] = serve.rows("serve", Path(folder))
    return {
        "output_tokens_per_cpu_s": result["output_tokens"] / result["cpu_s"]["engine"],
        "ttft_ms_p50": result["ttft_ms"]["p50"],
    }


if __name__ == "__main__":
    main()
