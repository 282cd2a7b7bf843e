"""The type of a config.json as its author wrote it: any JSON, read by the name of a setting."""

from collections.abc import Mapping
from typing import Any

ConfigJson = Mapping[str, Any]
