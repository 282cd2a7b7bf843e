"""Every request gets the tokens that PEFT gives: base and adapters at once, and with drafts."""

import pytest

from tests.e2e.oracle import (
    MAX_TOKENS,
    TinyWorld,
    ask_and_count,
    check_oracle,
    expected_answers,
    make_prompts,
)


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
