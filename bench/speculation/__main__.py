"""`python -m bench.speculation`: SmolLM2 with drafts and without, a JSON line per kind and batch.

One engine serves the same requests both ways, in turns; each figure is a median over the turns.
Tokens are counted from the moment when all requests of a batch have their first token, per second
of processor time. "without" gives an answer one token a step. Wants `make model`.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from bench.in_process import THREADS, EngineFactory
from bench.peers.rows import Row, write_rows
from bench.report import percentiles_ms, ratio, rounded
from bench.session import Ask, Session
from bench.speculation.texts import KINDS, Kind, Texts
from engine.core import EngineCore

_ARENA_TOKENS = 48_000
_LEAST_ASKS, _MOST_ASKS = 4, 64


@dataclass(frozen=True)
class Run:
    """One turn.   drafts: (drafted, accepted) tokens.   token_ids: of all answers."""

    tokens_per_cpu_s: float
    gaps_s: Sequence[float]
    tokens_per_row: float
    drafts: tuple[int, int]
    token_ids: Sequence[Sequence[int]]


def main() -> None:
    options = parse_options(sys.argv[1:])
    if not write_rows(run(options), options.out):
        sys.exit("answers with drafts differ from answers without")


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.speculation",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--stack", default="smollm2", help="a model of bench.checkpoint")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8, 16, 32])
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument(
        "--out", type=Path, help="file in which rows of the same setup are replaced"
    )
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> Iterator[tuple[str, Row, Row]]:
    """Yield (bench, setup, result) of each kind and batch."""
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        factory = EngineFactory(options.stack, Path(temporary))
        core = factory.make(
            arena_tokens=_ARENA_TOKENS,
            max_model_len=2048,
            quantization=options.quantization,
            speculation="auto",
            prefix_caching=False,
        )
        texts = Texts(factory.model_dir)
        for kind in options.kinds:
            asks = _asks(KINDS[kind], texts, options.output_tokens)
            for size in options.batches:
                result = _measure(core, asks[: max(size, _LEAST_ASKS)], size, options.turns)
                yield "speculation", _setup(options, kind, size), result


def _asks(kind: Kind, texts: Texts, output_tokens: int) -> list[Ask]:
    prompts = kind.prompts(texts)
    return [
        Ask(
            prompts[i % len(prompts)],
            output_tokens,
            grammar=kind.grammar,
            temperature=kind.temperature,
        )
        for i in range(_MOST_ASKS)
    ]


def _measure(core: EngineCore, asks: Sequence[Ask], size: int, num_turns: int) -> Row:
    turns = [
        [_serve(core, asks, size, has_drafts=has_drafts) for has_drafts in (False, True)]
        for _ in range(num_turns)
    ]
    without, with_drafts = zip(*turns, strict=True)
    ratios = [w.tokens_per_cpu_s / o.tokens_per_cpu_s for o, w in turns]
    drafted, accepted = with_drafts[0].drafts
    return {
        "speedup": rounded(median(ratios)),
        "speedups": [rounded(value) for value in ratios],
        "tokens_per_cpu_s": _median(run.tokens_per_cpu_s for run in with_drafts),
        "tokens_per_cpu_s_without": _median(run.tokens_per_cpu_s for run in without),
        "tokens_per_row": rounded(with_drafts[0].tokens_per_row),
        "drafted": drafted,
        "acceptance": ratio(accepted, drafted) if drafted else None,
        "itl_ms": percentiles_ms(gap for run in with_drafts for gap in run.gaps_s),
        "itl_ms_without": percentiles_ms(gap for run in without for gap in run.gaps_s),
        "valid": all(run.token_ids == without[0].token_ids for run in (*without, *with_drafts)),
    }


def _median(values: Iterator[float]) -> float:
    return rounded(median(values))


def _serve(core: EngineCore, asks: Sequence[Ask], size: int, *, has_drafts: bool) -> Run:
    """Serve `asks` in batches of `size`."""
    before = core.take_stats()
    num_tokens, num_rows, cpu_s = 0, 0, 0.0
    gaps_s: list[float] = []
    token_ids: list[Sequence[int]] = []
    for first in range(0, len(asks), size):
        batch = asks[first : first + size]
        session = Session(core)
        for ask in batch:
            session.send(replace(ask, drafts=has_drafts))
        while not all(map(session.num_tokens, range(len(batch)))):
            session.step()
        num_before = sum(map(session.num_tokens, range(len(batch))))
        begun_s = time.process_time()
        while session.num_open:
            num_rows += session.num_open
            session.step()
        cpu_s += time.process_time() - begun_s
        outcomes = session.outcomes()
        num_tokens += sum(len(o.token_ids) for o in outcomes) - num_before
        gaps_s += [gap for o in outcomes for gap in o.gaps_s]
        token_ids += [o.token_ids for o in outcomes]
    now = core.take_stats().drafts
    return Run(
        num_tokens / cpu_s,
        gaps_s,
        num_tokens / num_rows,
        (
            now.drafted_tokens - before.drafts.drafted_tokens,
            now.accepted_tokens - before.drafts.accepted_tokens,
        ),
        token_ids,
    )


def _setup(options: argparse.Namespace, kind: str, size: int) -> Row:
    return {
        "system": "Chorale, C",
        "kind": kind,
        "batch": size,
        "model": options.stack,
        "quantization": options.quantization,
        "output_tokens": options.output_tokens,
        "turns": options.turns,
        "threads": THREADS,
    }


if __name__ == "__main__":
    main()
