"""A benchmark's requests and their times: pure, and decided by the seed alone."""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from bench.outcome import Outcome

# The lengths that `chorale plan` plans for, by the same name for all benchmarks.
from server.capacity.traffic import Lengths as Lengths

Popularity = Literal["none", "identical", "uniform", "zipf", "distinct"]

_ZIPF_EXPONENT = 1.5


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A request. due_s: when to send it, in seconds from the start of the run."""

    index: int
    model: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    due_s: float

    def outcome(
        self,
        token_ids: Sequence[int],
        chunk_s: Sequence[float],
        *,
        sent_s: float | None = None,
        end_s: float | None = None,
        error: str | None = None,
    ) -> Outcome:
        """Return the outcome of its answer, which has to have max_tokens tokens.

        sent_s: None if it was sent when it was due.   end_s: None if its last chunk ended it.
        """
        return Outcome(
            index=self.index,
            model=self.model,
            num_prompt_tokens=len(self.prompt_token_ids),
            due_s=self.due_s,
            sent_s=self.due_s if sent_s is None else sent_s,
            end_s=chunk_s[-1] if end_s is None else end_s,
            chunk_s=tuple(chunk_s),
            token_ids=tuple(token_ids),
            error=error or (None if len(token_ids) == self.max_tokens else "wrong_length"),
        )


def make_requests(
    base_model: str,
    models: Sequence[str],
    vocab_size: int,
    count: int,
    prompt_tokens: str,
    output_tokens: str,
    *,
    popularity: Popularity = "distinct",
    rate: float = math.inf,
    seed: int = 0,
) -> list[BenchRequest]:
    """Return the requests in the order of their sending.

    models: adapters' names; without any, all requests are for the base model.   prompt_tokens,
    output_tokens: see Lengths.parse.   rate: requests per second on average; inf sends all at once.

    Each aspect has a random stream of its own, so that another rate sends the same prompts to the
    same models.
    """
    chances = [random.Random(f"{seed}/{name}") for name in ("models", "lengths", "tokens")]
    choosing, lengths, tokens = chances
    choose = _chooser(base_model, models, popularity if models else "none", choosing)
    due_s = _arrivals(rate, count, random.Random(f"{seed}/arrivals"))
    prompts, outputs = Lengths.parse(prompt_tokens), Lengths.parse(output_tokens)
    requests = []
    for index in range(count):
        num_prompt = lengths.randint(prompts.low, prompts.high)
        num_output = lengths.randint(outputs.low, outputs.high)
        prompt = tuple(tokens.randrange(vocab_size) for _ in range(num_prompt))
        requests.append(BenchRequest(index, choose(index), prompt, num_output, due_s[index]))
    return requests


def warm_up_requests(models: Iterable[str]) -> list[BenchRequest]:
    """Return a short request for each model, so that nothing is cold after them."""
    prompt = tuple(range(1, 33))
    return [BenchRequest(i, model, prompt, 4, 0.0) for i, model in enumerate(models)]


def _arrivals(rate: float, count: int, stream: random.Random) -> list[float]:
    """Return times of a Poisson process that starts with a request at 0; all are 0 if the rate is
    infinite.
    """
    due_s, now = [], 0.0
    for _ in range(count):
        due_s.append(now)
        now += stream.expovariate(rate)
    return due_s


def _chooser(
    base_model: str, models: Sequence[str], popularity: Popularity, stream: random.Random
) -> Callable[[int], str]:
    """Return a function from a request's index to its model."""
    match popularity:
        case "none":
            return lambda _: base_model
        case "identical":
            return lambda _: models[0]
        case "distinct":
            return lambda index: models[index % len(models)]
        case "uniform":
            return lambda _: stream.choice(models)
        case "zipf":
            weights = [1.0 / (rank**_ZIPF_EXPONENT) for rank in range(1, len(models) + 1)]
            return lambda _: stream.choices(models, weights)[0]
