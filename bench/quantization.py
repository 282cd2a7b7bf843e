"""`python -m bench.quantization`: what SmolLM2 loses in 8 and 4 bits: held-out loss and greedy
agreement. Each form is served by our engine, which scores the text. Wants `make model`.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer

from bench.in_process import THREADS, EngineFactory
from bench.measurement import Figures, Measurement, Row, main
from bench.report import ratio, rounded
from bench.session import Ask, Session
from engine.core import EngineCore

FORMS = ("float32", "int8", "int4")
"""Values of the engine's setting `quantization`, but for the first, with which others compare."""
_PARTS = 4  # every fourth topic is held out


def paragraphs() -> Iterator[str]:
    """Yield held-out paragraphs of Python's own documentation, which every interpreter ships. One
    that several topics share belongs to the first of them.
    """
    seen: set[str] = set()
    for number, name in enumerate(sorted(topics)):
        for paragraph in topics[name].split("\n\n"):
            if paragraph not in seen and number % _PARTS == 0:
                yield paragraph
            seen.add(paragraph)


@dataclass(frozen=True, kw_only=True)
class Quantization(Measurement):
    """The loss of each form.   num_rows: rows of the text, each of `row_tokens`."""

    told_apart: ClassVar = ("system", "form", "model")

    model: str = "smollm2"
    kernels: str = "native"
    num_rows: int = 40
    row_tokens: int = 257

    def rows(self, bench: str, folder: Path) -> Iterator[Row]:
        factory = EngineFactory(self.model, folder)
        rows = self._rows(factory.model_dir)
        exact: _Scores | None = None
        for form in FORMS:
            core = factory.make(
                arena_tokens=4 * self.row_tokens,
                max_model_len=self.row_tokens + 1,
                quantization=None if form == "float32" else form,
                cpu_kernels=self.kernels,
                prefix_caching=False,
            )
            began_s = time.process_time()
            found = _score(core, rows)
            cpu_s = time.process_time() - began_s
            exact = exact or found
            agrees = found.greedy == exact.greedy
            result = {
                "loss": rounded(found.loss),
                "loss_to_float32": ratio(found.loss, exact.loss),
                "greedy_agreement": rounded(agrees.float().mean().item()),
                "cpu_s": rounded(cpu_s),
            }
            yield bench, self._setup(form), result

    def _setup(self, form: str) -> Figures:
        version = ".".join(map(str, sys.version_info[:2]))
        return {
            "system": f"Chorale, {'C' if self.kernels == 'native' else self.kernels}",
            "form": form,
            "model": self.model,
            "text": f"Python {version}'s pydoc_data.topics, every fourth topic",
            "tokens": self.num_rows * (self.row_tokens - 1),
            "row_tokens": self.row_tokens,
            "threads": THREADS,
        }

    def _rows(self, model_dir: Path) -> torch.Tensor:
        """Return token ids [rows, tokens] from all over the text: neighbouring topics are alike."""
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        ids = tokenizer.encode("\n\n".join(paragraphs()), add_special_tokens=False).ids
        starts = torch.linspace(0, len(ids) - self.row_tokens, self.num_rows).long()
        return torch.tensor(ids)[starts.unsqueeze(1) + torch.arange(self.row_tokens)]


@dataclass(frozen=True)
class _Scores:
    """Scores of all tokens in their order.   logprobs: of the text's.   greedy: likeliest ids."""

    logprobs: torch.Tensor
    greedy: torch.Tensor

    @property
    def loss(self) -> float:
        return -self.logprobs.mean().item()


def _score(core: EngineCore, rows: torch.Tensor) -> _Scores:
    """Score every token of each row but its first."""
    logprobs: list[float] = []
    greedy: list[int] = []

    def note(index: int, scored: Sequence[Any]) -> None:
        logprobs.extend(token.logprob for token in scored)
        greedy.extend(token.top[0][0] for token in scored)

    for row in rows.tolist():
        session = Session(core, note)
        session.send(Ask(tuple(row), max_tokens=0, prompt_logprobs=1))
        session.finish()
    return _Scores(torch.tensor(logprobs), torch.tensor(greedy))


if __name__ == "__main__":
    main("bench.quantization", {"quantization": Quantization()}, __doc__)
