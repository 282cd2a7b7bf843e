"""A config.json as its author wrote it: any JSON, read by the name of a setting."""

from collections.abc import Mapping
from typing import Any

ConfigJson = Mapping[str, Any]


def none_by_layer(config: ConfigJson) -> tuple[None, ...]:
    """Give every layer None: it has no window, or no experts."""
    num_layers: int = config["num_hidden_layers"]
    return (None,) * num_layers
