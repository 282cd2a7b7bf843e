"""The interface of all measurements: a `setup` that leads to a `result`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Measurement(ABC):
    """A measurement; its fields are the row's `setup`."""

    @abstractmethod
    def measure(self, folder: Path) -> dict[str, Any]:
        """Return the row's `result`.   folder: an empty folder on the disk that is measured."""
