"""A disk whose figures the tests set."""

from dataclasses import dataclass
from pathlib import Path

from registry.storage.free_space import Volume


@dataclass
class FakeDisk:
    """One volume for all folders; FreeSpace looks at it."""

    free_bytes: int
    size_bytes: int = 1 << 20

    def __call__(self, folder: Path) -> Volume:
        return Volume(1, self.size_bytes, self.free_bytes)
