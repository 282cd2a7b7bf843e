"""The oracle: through the whole stack every request gets the tokens that PEFT gives."""

import random
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

    def ask(model: str, prompt: list[int]) -> list[int]:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "return_token_ids": True,
        }
        answer = world.tenant.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        expected = (
            world.tenant.http.get(f"/v1/adapters/{model}").json() if model in world.dirs else None
        )
        digest = expected["latest"]["digest"] if expected else ""
        assert answer.headers["x-chorale-adapter-digest"] == digest
        token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return token_ids

    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(ask, models, prompts))


def check_oracle(world: TinyWorld, count: int = 24) -> None:
    prompts = make_prompts(count, seed=5)
    names = [world.stack.model, *world.dirs]
    models = [names[i % len(names)] for i in range(count)]
    expected = {}
    for name in names:
        model = merged_model(world.model_dir, world.dirs.get(name))
        expected[name] = [greedy(model, prompt, MAX_TOKENS) for prompt in prompts]
    distinct = sum(len({tuple(expected[n][i]) for n in names}) == len(names) for i in range(count))
    assert distinct >= 0.9 * count, "the adapters must be seen to matter"
    got = ask_all(world, models, prompts)
    wrong = [i for i, model in enumerate(models) if got[i] != expected[model][i]]
    assert not wrong, wrong
