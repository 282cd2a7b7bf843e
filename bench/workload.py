"""A benchmark's requests and their times: pure, and decided by the seed alone."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

# The lengths that `chorale plan` plans for, by the same name for all benchmarks.
from server.capacity.traffic import Lengths as Lengths

Popularity = Literal["none", "identical", "uniform", "zipf", "distinct"]

_ZIPF_EXPONENT = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Parameters that a benchmark's requests are made from.

    rate: requests per second on average; inf sends all at once.   models: adapters' names.
    """

    base_model: str
    models: tuple[str, ...]
    popularity: Popularity
    rate: float
    num_requests: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    vocab_size: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A request. due_s: when to send it, in seconds from the start of the run."""

    index: int
    model: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    due_s: float


def make_requests(workload: Workload) -> list[BenchRequest]:
    """Return the requests in the order of their sending.

    Each aspect has a random stream of its own, so that another rate sends the same prompts to the
    same models.
    """
    if not workload.models and workload.popularity != "none":
        raise ValueError("popularity must be none where there are no adapters")
    count = workload.num_requests
    streams = [random.Random(f"{workload.seed}/{name}") for name in ("models", "lengths", "tokens")]
    models, lengths, tokens = streams
    choose = _chooser(workload, models)
    due_s = _arrivals(workload.rate, count, random.Random(f"{workload.seed}/arrivals"))
    requests = []
    for index in range(count):
        num_prompt = lengths.randint(workload.prompt_tokens.low, workload.prompt_tokens.high)
        num_output = lengths.randint(workload.output_tokens.low, workload.output_tokens.high)
        prompt = tuple(tokens.randrange(workload.vocab_size) for _ in range(num_prompt))
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


def _chooser(workload: Workload, stream: random.Random) -> Callable[[int], str]:
    """Return a function from a request's index to its model."""
    models: Sequence[str] = workload.models
    match workload.popularity:
        case "none":
            return lambda _: workload.base_model
        case "identical":
            return lambda _: models[0]
        case "distinct":
            return lambda index: models[index % len(models)]
        case "uniform":
            return lambda _: stream.choice(models)
        case "zipf":
            weights = [1.0 / (rank**_ZIPF_EXPONENT) for rank in range(1, len(models) + 1)]
            return lambda _: stream.choices(models, weights)[0]
