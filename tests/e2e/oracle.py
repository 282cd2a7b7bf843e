"""The oracle: through the whole stack every request gets the tokens that PEFT gives."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.stack import Stack, Tenant
from tests.oracle import greedy, merged_model

MAX_TOKENS = 16


@dataclass
class TinyWorld:
    """A stack on a random model, and one tenant with adapters.   dirs: folders by adapter."""

    stack: Stack
    tenant: Tenant
    model_dir: Path
    dirs: dict[str, Path]

    @classmethod
    def on(cls, stack: Stack, model_dir: Path, dirs: dict[str, Path]) -> "TinyWorld":
        """Push the adapters to a stack for a new tenant."""
        tenant = stack.tenant("acme")
        for name, folder in dirs.items():
            tenant.push(name, folder)
        return cls(stack, tenant, model_dir, dirs)


def make_prompts(count: int, seed: int) -> list[list[int]]:
    """Make prompts of token ids above the special ones, many with lengths near a block's end."""
    chance = random.Random(seed)
    return [
        [chance.randrange(4, 290) for _ in range(chance.choice([1, 7, 15, 16, 33, 63, 100]))]
        for _ in range(count)
    ]


def ask_all(world: TinyWorld, models: list[str], prompts: list[list[int]]) -> list[list[int]]:
    """Send one request per prompt, all at once; return the token ids of the answers."""
    return [token_ids for token_ids, _ in ask_and_count(world, models, prompts)]


def ask_and_count(
    world: TinyWorld, models: list[str], prompts: list[list[int]], **options: object
) -> list[tuple[list[int], int]]:
    """Do as `ask_all` does, and also return how many tokens of each answer were drafted."""

    def ask(model: str, prompt: list[int]) -> tuple[list[int], int]:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "return_token_ids": True,
            **options,
        }
        answer = world.tenant.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        expected = (
            world.tenant.http.get(f"/v1/adapters/{model}").json() if model in world.dirs else None
        )
        digest = expected["latest"]["digest"] if expected else ""
        assert answer.headers["x-chorale-adapter-digest"] == digest
        [choice], usage = answer.json()["choices"], answer.json()["usage"]
        details = usage["completion_tokens_details"]
        return choice["token_ids"], details["accepted_prediction_tokens"]

    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(ask, models, prompts))


def expected_answers(
    world: TinyWorld, prompts: list[list[int]], load: Callable = merged_model
) -> dict[str, list[list[int]]]:
    """Return by model the answers that prompts get alone. load: see tests.oracle."""
    answers = {}
    for name in (world.stack.model, *world.dirs):
        model = load(world.model_dir, world.dirs.get(name))
        answers[name] = [greedy(model, prompt, MAX_TOKENS) for prompt in prompts]
    return answers


def check_oracle(world: TinyWorld, count: int = 24, load: Callable = merged_model) -> None:
    prompts = make_prompts(count, seed=5)
    names = [world.stack.model, *world.dirs]
    models = [names[i % len(names)] for i in range(count)]
    expected = expected_answers(world, prompts, load)
    distinct = sum(len({tuple(expected[n][i]) for n in names}) == len(names) for i in range(count))
    assert distinct >= 0.9 * count, "the adapters must be seen to matter"
    got = ask_all(world, models, prompts)
    wrong = [i for i, model in enumerate(models) if got[i] != expected[model][i]]
    assert not wrong, wrong
