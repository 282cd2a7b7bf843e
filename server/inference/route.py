"""A route: one name for several models, and the rule by which one of them answers a request.

Strategies:
    fallback   the models in order, each if the ones before it could not begin an answer
    weights    one model, chosen by the request's key; models get shares of the keys
    cascade    the models in order, each if the answer before it was not likely enough
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from registry.catalog.alias_rows import BUCKETS, bucket_of
from registry.errors import Invalid

Strategy = Literal["fallback", "weights", "cascade"]

MAX_MODELS = 8

_OPTION: dict[Strategy, str] = {
    "fallback": "first_token_timeout_s",
    "weights": "weight",
    "cascade": "min_mean_logprob",
}
"""The option that models have under each strategy, and under no other."""


@dataclass(frozen=True, slots=True)
class RouteModel:
    """A model of a route, by the name that requests use.

    first_token_timeout_s: seconds in which its first token has to come; None for the server's
    limit.   weight: its share of the request keys, relative to the sum of weights.
    min_mean_logprob: the least mean logprob of its tokens with which its answer is taken, at most
    0; None where every answer is.
    """

    model: str
    first_token_timeout_s: float | None = None
    weight: int | None = None
    min_mean_logprob: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A route.   owner: a tenant's id, or "" for a route of the operator."""

    owner: str
    name: str
    strategy: Strategy
    models: tuple[RouteModel, ...]
    created_at_ms: int = 0
    updated_at_ms: int = 0

    def models_for(self, request_key: str) -> tuple[RouteModel, ...]:
        """The models that a request with this key may be tried at, in their order."""
        if self.strategy != "weights":
            return self.models
        weights = [model.weight or 0 for model in self.models]
        place = bucket_of(f"route:{self.owner}", self.name, request_key) * sum(weights)
        for model, weight in zip(self.models, weights, strict=True):
            if (place := place - weight * BUCKETS) < 0:
                return (model,)
        raise AssertionError("the last weight ends above the last bucket")


def check_models(strategy: Strategy, models: Sequence[RouteModel]) -> None:
    """Check that every model has the options of the strategy. Raises Invalid with the path."""
    for place, model in enumerate(models):
        for option in _OPTION.values():
            path, value = f"models.{place}.{option}", getattr(model, option)
            if value is not None and option != _OPTION[strategy]:
                raise Invalid.at(path, f"a route of {strategy} has no {option}")
        path, is_last = f"models.{place}.{_OPTION[strategy]}", place == len(models) - 1
        if strategy == "weights" and model.weight is None:
            raise Invalid.at(path, "every model of a route of weights needs one")
        if strategy == "cascade" and is_last != (model.min_mean_logprob is None):
            raise Invalid(
                f"{path}: every model of a cascade but the last needs one, and the last, whose "
                "answer is always taken, has none.",
                param=path,
            )


assert set(_OPTION) == set(get_args(Strategy))
