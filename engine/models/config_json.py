"""A config.json as its author wrote it: any JSON, read by the name of a setting."""

from collections.abc import Mapping
from typing import Any

ConfigJson = Mapping[str, Any]


def none_by_layer(config: ConfigJson) -> tuple[None, ...]:
    """None for every layer: families without windows see all, those without experts are dense."""
    num_layers: int = config["num_hidden_layers"]
    return (None,) * num_layers
