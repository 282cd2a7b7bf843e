"""`python -m bench.cascade`: accuracy and price of a small model, a large one, and their cascades.

One server has the demo's two base models. A token of either, in a prompt (cached or not) or in an
answer, costs one nano-dollar for each thousand of the model's parameters. The held-out questions
are asked over HTTP, greedily, and an answer is right if it has every letter of the plain style.

Questions whose text has an even crc32 choose the least mean logprob with which an answer of the
small model is taken; the others are reported. There are two cascades: `cheap` is the one of least
price that is right at least as often as the large model less 1 % on the questions that choose, and
`equal` the one of least price that is right there as often as the large model.
"""

import argparse
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import fsum
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load_file

from bench.experiment import replace_rows
from bench.product import ProductFailed, Setting, serving
from bench.report import describe_machine, json_line, ratio, rounded
from demo.domain import Question, held_out
from demo.styles import PLAIN

_DEMO = Path(__file__).parent.parent / "demo"
BASES = {"small": _DEMO / "small", "large": _DEMO / "model"}
LOSSES = {"cheap": 0.01, "equal": 0.0}
"""The share of the questions that a cascade may answer worse than the large model, by its name."""

_PARAMETERS_PER_NANOUSD = 1000
_LEAST_LOGPROB = -100.0
_MAX_TOKENS = 96
_AT_ONCE = 8
_HTTP_TIMEOUT_S = 120.0
_SETTLE_TIMEOUT_S = 60.0
_POLL_S = 0.1


Row = tuple[dict[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class Asked:
    """One request's answer and bill.

    mean_logprob: of the answer's tokens.   went_on: whether the small model's answer was not taken.
    receipts: of all attempts.
    """

    is_right: bool
    mean_logprob: float
    went_on: bool = False
    receipts: Sequence[dict[str, Any]] = ()

    @property
    def nanousd(self) -> int:
        return sum(receipt["amount_nanousd"] for receipt in self.receipts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.cascade", description=__doc__)
    parser.add_argument("--out", type=Path, help="file in which rows of the same name are replaced")
    options = parser.parse_args()
    with running() as client:
        rows = measure(client, held_out())
    lines = [json_line("cascade", describe_machine(), *row) + "\n" for row in rows]
    sys.stdout.writelines(lines)
    if options.out:
        replace_rows(options.out, lines)


@contextmanager
def running() -> Iterator[httpx.Client]:
    """Serve both base models, by the names of `BASES` and with their prices; yield a tenant."""
    models = [{"model": str(folder), "model_name": name} for name, folder in BASES.items()]
    settings: dict[str, Setting] = {
        "models": models, "threads": 1, "device": "cpu", "arena_bytes": 64 << 20,
    }  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        serving(settings, Path(folder)) as product,
    ):
        product.wait_serving(BASES)
        for name, nanousd in prices().items():
            kinds = ("prompt_nanousd", "cached_nanousd", "completion_nanousd")
            product.add_price(base_model=name, **dict.fromkeys(kinds, nanousd))
        with httpx.Client(
            base_url=product.url,
            headers={"authorization": f"Bearer {product.create_tenant('bench')}"},
            timeout=_HTTP_TIMEOUT_S,
            trust_env=False,
        ) as client:
            yield client


def prices() -> dict[str, int]:
    """The price of a token in nano-dollars, by base model."""
    tensors = {name: load_file(folder / "model.safetensors") for name, folder in BASES.items()}
    return {
        name: round(sum(tensor.numel() for tensor in of.values()) / _PARAMETERS_PER_NANOUSD)
        for name, of in tensors.items()
    }


def measure(client: httpx.Client, questions: Sequence[Question]) -> list[Row]:
    """Ask small, large and both cascades. Returns a (setup, result) for each.

    client: a tenant's, of a server with both base models.   questions: some of each half.
    """
    halves = [[q for q in questions if chooses(q) is half] for half in (True, False)]
    asked = {name: [_ask(client, name, half) for half in halves] for name in BASES}
    setups: dict[str, dict[str, Any]] = {
        name: {"nanousd_per_token": nanousd} for name, nanousd in prices().items()
    }
    for name, loss in LOSSES.items():
        least = choose(asked["small"][0], asked["large"][0], loss)
        models = [{"model": "small", "min_mean_logprob": least}, {"model": "large"}]
        route = {"strategy": "cascade", "models": models}
        client.put(f"/v1/routes/{name}", json=route).raise_for_status()
        asked[name] = [_ask(client, name, half) for half in halves]
        setups[name] = {"loss": loss, "min_mean_logprob": least}
    choosing, reported = (
        {name: _figures(each[half], asked["large"][half]) for name, each in asked.items()}
        for half in (0, 1)
    )
    return [
        ({"model": name, **setup}, {**reported[name], "choosing": choosing[name]})
        for name, setup in setups.items()
    ]


def chooses(question: Question) -> bool:
    """Whether the question is of the half on which thresholds are chosen."""
    return zlib.crc32(question.text.encode()) % 2 == 0


def choose(small: Sequence[Asked], large: Sequence[Asked], loss: float) -> float:
    """The min_mean_logprob of least price with which answers are right as often as large's less
    `loss`.

    small, large: answers of both models to the same questions. A lower threshold never costs more,
    so this is the lowest; thresholds lie halfway between two answers' neighbouring mean logprobs.
    """
    pairs = list(zip(small, large, strict=True))
    needed = sum(answer.is_right for answer in large) - loss * len(pairs)
    means = sorted({answer.mean_logprob for answer in small})
    for least in (_LEAST_LOGPROB, *((low + high) / 2 for low, high in pairwise(means))):
        if sum((s if s.mean_logprob >= least else b).is_right for s, b in pairs) >= needed:
            return least
    return 0.0


def _ask(client: httpx.Client, model: str, questions: Sequence[Question]) -> list[Asked]:
    """Ask a model or a route all questions, a few at a time, and then for the receipts."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(partial(_answer, client, model), questions))
        return list(pool.map(partial(_asked, client), questions, answers))


def _answer(client: httpx.Client, model: str, question: Question) -> httpx.Response:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question.text}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
        "logprobs": True,
    }
    return client.post("/v1/chat/completions", json=body).raise_for_status()


def _asked(client: httpx.Client, question: Question, answer: httpx.Response) -> Asked:
    body = answer.json()
    (choice,) = body["choices"]
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    return Asked(
        is_right=choice["message"]["content"] == PLAIN.say(question.reply),
        mean_logprob=fsum(logprobs) / len(logprobs),
        went_on=";weak" in answer.headers.get("x-chorale-attempts", ""),
        receipts=_receipts(client, body["id"]),
    )


def _receipts(client: httpx.Client, answer_id: str) -> list[dict[str, Any]]:
    """The receipts of all attempts, once they are settled. Raises ProductFailed."""
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while time.monotonic() < deadline:
        answer = client.get(f"/v1/receipts/{answer_id}/attempts")
        if answer.status_code == 200:
            return [each["receipt"] for each in answer.json()["data"]]
        time.sleep(_POLL_S)
    raise ProductFailed(f"the receipts of {answer_id}: {answer.status_code} {answer.text}")


def _figures(asked: Sequence[Asked], large: Sequence[Asked]) -> dict[str, Any]:
    """Figures of a model's answers, beside those of the large model to the same questions."""
    num_right, large_right = (sum(answer.is_right for answer in each) for each in (asked, large))
    nanousd, large_nanousd = (sum(answer.nanousd for answer in each) for each in (asked, large))
    receipts = [receipt for answer in asked for receipt in answer.receipts]
    return {
        "requests": len(asked),
        "accuracy": rounded(num_right / len(asked)),
        "accuracy_below_large": rounded((large_right - num_right) / len(asked)),
        "went_on": rounded(sum(answer.went_on for answer in asked) / len(asked)),
        "attempts": len(receipts),
        "prompt_tokens": sum(receipt["prompt_tokens"] for receipt in receipts),
        "completion_tokens": sum(receipt["completion_tokens"] for receipt in receipts),
        "price_usd": nanousd / 1e9,
        "price_to_large": ratio(nanousd, large_nanousd),
    }


if __name__ == "__main__":
    main()
