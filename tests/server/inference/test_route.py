"""Definitions of routes, and the share of the requests that each model of weights gets."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.errors import Invalid
from server.inference.route import Route, RouteModel, check_models

A, B = RouteModel("a"), RouteModel("b")


def weights(*given: int, name: str = "r") -> Route:
    models = tuple(RouteModel(f"m{i}", weight=weight) for i, weight in enumerate(given))
    return Route(owner="ten_1", name=name, strategy="weights", models=models)


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=8), st.text(max_size=9))
def test_a_key_always_gets_the_same_one_model(given_weights, key) -> None:
    route = weights(*given_weights)
    assert len(route.models_for(key)) == 1
    assert route.models_for(key) == route.models_for(key)


def test_models_get_the_shares_of_their_weights() -> None:
    route = weights(90, 9, 1)
    counted = Counter(route.models_for(str(key))[0].model for key in range(20_000))
    assert 17_800 < counted["m0"] < 18_200
    assert 1_680 < counted["m1"] < 1_920
    assert 140 < counted["m2"] < 260


def test_a_key_keeps_the_first_model_when_its_weight_rises_and_routes_differ() -> None:
    first, more, other = weights(50, 50), weights(70, 30), weights(50, 50, name="other")
    keys = [str(key) for key in range(500)]
    before = {key for key in keys if first.models_for(key)[0].model == "m0"}
    assert before <= {key for key in keys if more.models_for(key)[0].model == "m0"}
    assert before != {key for key in keys if other.models_for(key)[0].model == "m0"}


def test_other_strategies_try_all_models_in_order() -> None:
    route = Route(owner="", name="r", strategy="fallback", models=(B, A))
    assert route.models_for("any") == (B, A)


@pytest.mark.parametrize(
    ("strategy", "models", "path"),
    [
        ("fallback", [A, RouteModel("b", weight=1)], "models.1.weight"),
        ("fallback", [RouteModel("a", min_mean_logprob=-1.0)], "models.0.min_mean_logprob"),
        ("weights", [RouteModel("a", weight=1), B], "models.1.weight"),
        ("weights", [RouteModel("a", 5.0, 1)], "models.0.first_token_timeout_s"),
        ("cascade", [A, B], "models.0.min_mean_logprob"),
        ("cascade", [RouteModel("a", min_mean_logprob=-0.1)], "models.0.min_mean_logprob"),
        ("cascade", [RouteModel("a", 3.0), B], "models.0.first_token_timeout_s"),
    ],
)
def test_an_option_of_another_strategy_or_a_missing_one_is_refused_by_its_path(
    strategy, models, path
) -> None:
    with pytest.raises(Invalid, match=path) as refused:
        check_models(strategy, models)
    assert refused.value.param == path


def test_each_strategy_has_its_options() -> None:
    check_models("fallback", [RouteModel("a", first_token_timeout_s=5.0), B])
    check_models("weights", [RouteModel("a", weight=90), RouteModel("b", weight=10)])
    check_models("cascade", [RouteModel("a", min_mean_logprob=-0.2), B])
