"""What all of these are: something with a `setup` that comes to a `result`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Measurement(ABC):
    """The fields are the row's `setup`."""

    @abstractmethod
    def measure(self, folder: Path) -> dict[str, Any]:
        """The row's `result`.   folder: empty, on the disk that is measured."""
