"""The oracle: through the whole stack every request gets the tokens that PEFT gives."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.conftest import TinyWorld
from tests.e2e.stack import running
from tests.oracle import greedy, merged_model, rounding_model
from tests.quantized_models import save_quantized
from tests.tiny_models import ALL_TARGETS, save_adapter, save_model

MAX_TOKENS = 16


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
    """Like `ask_all`; also return how many tokens of each answer were drafted."""

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
            world.tenant.http.get(f"/v1/adapters/{model}").json() if model != "base" else None
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
    for name in ("base", *world.dirs):
        model = load(world.model_dir, world.dirs.get(name))
        answers[name] = [greedy(model, prompt, MAX_TOKENS) for prompt in prompts]
    return answers


def check_oracle(world: TinyWorld, count: int = 24, load: Callable = merged_model) -> None:
    prompts = make_prompts(count, seed=5)
    names = ["base", *world.dirs]
    models = [names[i % len(names)] for i in range(count)]
    expected = expected_answers(world, prompts, load)
    distinct = sum(len({tuple(expected[n][i]) for n in names}) == len(names) for i in range(count))
    assert distinct >= 0.9 * count, "the adapters must be seen to matter"
    got = ask_all(world, models, prompts)
    wrong = [i for i, model in enumerate(models) if got[i] != expected[model][i]]
    assert wrong == []


def test_24_concurrent_requests_over_base_and_three_adapters_equal_peft(tiny: TinyWorld) -> None:
    check_oracle(tiny)


def test_so_they_do_with_drafts_of_their_tenants_answers(tiny: TinyWorld) -> None:
    """Asked again, one after the other, each is drafted from what its own adapter said before."""
    prompts = make_prompts(8, seed=6)
    names = ["base", *tiny.dirs]
    models = [names[i % len(names)] for i in range(8)]
    expected = expected_answers(tiny, prompts)
    for time in range(2):
        got = [
            ask_and_count(tiny, [model], [prompt], speculation="shared")[0]
            for model, prompt in zip(models, prompts, strict=True)
        ]
        assert [ids for ids, _ in got] == [expected[m][i] for i, m in enumerate(models)]
        if time:
            assert sum(accepted for _, accepted in got) > 8 * MAX_TOKENS / 2


def test_swapping_two_adapters_on_purpose_fails_the_oracle(tiny: TinyWorld) -> None:
    swapped = dict(tiny.dirs) | {"alpha": tiny.dirs["beta"], "beta": tiny.dirs["alpha"]}
    with pytest.raises(AssertionError, match=r"\[.*1.*\]"):
        check_oracle(TinyWorld(tiny.stack, tiny.tenant, tiny.model_dir, swapped), count=8)


def test_two_ranks_that_share_the_model_equal_peft(tiny_model, tmp_path) -> None:
    specs = {
        "one": {"r": 4, "rank_pattern": {"v_proj": 11, "down_proj": 9}},
        "two": {"r": 16, "use_rslora": True},
        "three": {"r": 3, "target_modules": ["o_proj", "down_proj", "embed_tokens", "lm_head"]},
    }
    dirs = {
        name: save_adapter(tiny_model, tmp_path / name, seed=300 + i, **spec)
        for i, (name, spec) in enumerate(specs.items())
    }
    with running(tmp_path / "stack", tiny_model, tensor_parallel_size=2) as stack:
        tenant = stack.tenant("acme")
        for name, folder in dirs.items():
            tenant.push(name, folder)
        check_oracle(TinyWorld(stack, tenant, tiny_model, dirs), count=12)


def test_an_untied_model_in_the_old_spelling_equals_peft(tmp_path) -> None:
    model_dir = save_model(tmp_path / "model", tied=False, old_spelling=True)
    dirs = {
        name: save_adapter(
            model_dir, tmp_path / name, seed=200 + i, r=2 ** (i + 1), target_modules=targets
        )
        for i, (name, targets) in enumerate(
            {
                "one": ALL_TARGETS,
                "two": ["lm_head", "v_proj"],
                "three": [*ALL_TARGETS, "embed_tokens", "lm_head"],
            }.items()
        )
    }
    # The arena holds two of the three adapters beside the KV, so that they come and go.
    with running(tmp_path / "stack", model_dir, arena_bytes=1 << 20, max_model_len=128) as stack:
        tenant = stack.tenant("acme")
        for name, folder in dirs.items():
            tenant.push(name, folder)
        check_oracle(TinyWorld(stack, tenant, model_dir, dirs), count=12)


@pytest.mark.parametrize(
    ("kind", "load", "settings"),
    [
        ("gptq", rounding_model, {}),
        ("W4A16 zeros", rounding_model, {"prefix_caching": False}),
        ("FP8", merged_model, {"tensor_parallel_size": 2}),
    ],
)
def test_a_quantised_checkpoint_equals_peft_on_its_numbers(tmp_path, kind, load, settings) -> None:
    whole = save_model(tmp_path / "model", intermediate_size=192)
    quantized, twin = save_quantized(whole, tmp_path, kind)
    dirs = {
        name: save_adapter(twin, tmp_path / name, seed=400 + i, r=2 ** (i + 2))
        for i, name in enumerate(("one", "two"))
    }
    with running(tmp_path / "stack", quantized, **settings) as stack:
        tenant = stack.tenant("acme")
        for name, folder in dirs.items():
            tenant.push(name, folder)
        check_oracle(TinyWorld(stack, tenant, twin, dirs), 12, load)
