"""The table has every pair of every value, and a value of a new feature cannot be forgotten."""

from itertools import combinations, product

import pytest

from tests.pairs.asks import ASKS
from tests.pairs.covering import cover
from tests.pairs.models import HEADS, LAYERS, SETTINGS
from tests.pairs.table import ASK, AXES, DEED, WORLD, is_possible, runs, worlds
from tests.pairs.world import DEEDS
from tests.quantized_models import KINDS


def test_every_pair_of_values_that_is_possible_is_run() -> None:
    ours = runs(worlds())
    for (one, ones), (other, others) in combinations(AXES.items(), 2):
        for value, other_value in product(ones, others):
            pair = {one: value, other: other_value}
            assert is_possible(pair) == any(pair.items() <= run.items() for run in ours), pair


def test_every_value_has_what_it_stands_for_and_no_other_is_left_out() -> None:
    assert set(ASK) == set(ASKS)
    assert set(DEED) == set(DEEDS)
    assert set(WORLD["form"]) == {"float32", *SETTINGS} | (set(WORLD["form"]) & set(KINDS))
    assert (set(WORLD["layers"]), set(WORLD["kernels"])) == (set(LAYERS), set(HEADS))


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_a_cover_has_every_combination_and_is_not_much_larger_than_it_must_be(
    strength: int,
) -> None:
    axes = {"a": "123456", "b": "1234", "c": "12", "d": "12"}
    cases = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    chosen = cover(cases, strength)
    for names in combinations(axes, strength):
        wanted = set(product(*(axes[name] for name in names)))
        assert {tuple(case[name] for name in names) for case in chosen} == wanted
    least = {1: 6, 2: 24, 3: 48}[strength]
    assert least <= len(chosen) <= 1.25 * least
