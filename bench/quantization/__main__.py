"""`python -m bench.quantization`: what SmolLM2 loses in 8 and 4 bits, a JSON line per form.

Each form is served by our engine, which scores a held-out text. "gptq" is a checkpoint of 4 bits
that GPTQ makes of the model first, with a calibration text that shares nothing with the other.
Wants `make model`.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from bench.in_process import THREADS, EngineFactory
from bench.peers.rows import Row, write_rows
from bench.quantization.gptq import rounded_projections
from bench.quantization.gptq_file import write_gptq
from bench.quantization.text import calibration_rows, held_out_rows
from bench.report import ratio, rounded
from bench.session import Ask, Session
from engine.core import EngineCore

FORMS: dict[str, str | None] = {"float32": None, "int8": "int8", "int4": "int4", "gptq": None}
"""The engine's setting `quantization` by form, the form to compare with first."""


@dataclass(frozen=True)
class Scores:
    """Scores of all tokens in their order.   logprobs: of the text's.   greedy: likeliest ids."""

    logprobs: torch.Tensor
    greedy: torch.Tensor

    @property
    def loss(self) -> float:
        return -self.logprobs.mean().item()


def main() -> None:
    options = parse_options(sys.argv[1:])
    write_rows(run(options), options.out)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.quantization",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--stack", default="smollm2", help="a model of bench.checkpoint")
    parser.add_argument("--kernels", choices=("native", "torch"), default="native")
    parser.add_argument("--rows", type=int, default=40, help="rows of the held-out text")
    parser.add_argument("--calibration-rows", type=int, default=32)
    parser.add_argument("--row-tokens", type=int, default=257)
    parser.add_argument("--group-size", type=int, choices=(32, 64), default=32, help="of gptq")
    parser.add_argument(
        "--out", type=Path, help="file in which rows of the same setup are replaced"
    )
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> Iterator[tuple[str, Row, Row]]:
    """Yield each row as soon as it is measured."""
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        factory = EngineFactory(options.stack, Path(temporary))
        rows = held_out_rows(factory.model_dir, options.rows, options.row_tokens)
        exact: Scores | None = None
        for form, quantization in FORMS.items():
            model_dir = (
                _gptq(factory.model_dir, options, Path(temporary)) if form == "gptq" else None
            )
            core = factory.make(
                arena_tokens=4 * options.row_tokens, max_model_len=options.row_tokens + 1,
                model_dir=model_dir, quantization=quantization, cpu_kernels=options.kernels,
                prefix_caching=False,
            )  # fmt: skip
            began_s = time.process_time()
            found = scores(core, rows)
            cpu_s = time.process_time() - began_s
            exact = exact or found
            yield "quantization", _setup(options, form), _result(found, exact, cpu_s)


def scores(core: EngineCore, rows: torch.Tensor) -> Scores:
    """Score every token of each row but its first.   rows: [rows, tokens]."""
    logprobs, greedy = [], []

    def note(index: int, scored: Sequence[Any]) -> None:
        logprobs.extend(token.logprob for token in scored)
        greedy.extend(token.top[0][0] for token in scored)

    for row in rows.tolist():
        session = Session(core, note)
        session.send(Ask(tuple(row), max_tokens=0, prompt_logprobs=1))
        while session.num_open:
            session.step()
    return Scores(torch.tensor(logprobs), torch.tensor(greedy))


def _gptq(model_dir: Path, options: argparse.Namespace, temporary: Path) -> Path:
    """Round the model with GPTQ. Returns the folder of the checkpoint."""
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    rows = calibration_rows(model_dir, options.calibration_rows, options.row_tokens)
    weights = dict(rounded_projections(model, rows, options.group_size))
    write_gptq(model_dir, temporary / "gptq", weights)
    return temporary / "gptq"


def _setup(options: argparse.Namespace, form: str) -> Row:
    version = ".".join(map(str, sys.version_info[:2]))
    setup = {
        "system": f"Chorale, {'C' if options.kernels == 'native' else options.kernels}",
        "form": form,
        "model": options.stack,
        "text": f"Python {version}'s pydoc_data.topics, every fourth topic",
        "tokens": options.rows * (options.row_tokens - 1),
        "row_tokens": options.row_tokens,
        "threads": THREADS,
    }
    if form == "gptq":
        calibration = options.calibration_rows * options.row_tokens
        setup |= {"group_size": options.group_size, "calibration_tokens": calibration}
    return setup


def _result(found: Scores, exact: Scores, cpu_s: float) -> Row:
    agrees = found.greedy == exact.greedy
    return {
        "loss": rounded(found.loss),
        "loss_to_float32": ratio(found.loss, exact.loss),
        "greedy_agreement": rounded(agrees.float().mean().item()),
        "cpu_s": rounded(cpu_s),
    }


if __name__ == "__main__":
    main()
