"""Every request gets the tokens that PEFT gives: base and adapters at once."""

import pytest

from tests.e2e.oracle import TinyWorld, check_oracle


def test_24_concurrent_requests_over_base_and_three_adapters_equal_peft(tiny: TinyWorld) -> None:
    check_oracle(tiny)


def test_swapping_two_adapters_on_purpose_fails_the_oracle(tiny: TinyWorld) -> None:
    swapped = dict(tiny.dirs) | {"alpha": tiny.dirs["beta"], "beta": tiny.dirs["alpha"]}
    with pytest.raises(AssertionError, match=r"\[.*1.*\]"):
        check_oracle(TinyWorld(tiny.stack, tiny.tenant, tiny.model_dir, swapped), count=8)
