"""A folder for files that are on their way: parts, builds, objects to prove, exports."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from registry.storage.free_space import FreeSpace, naming_full


class WorkDir:
    """Gives each job a folder of its own under `path`, and room for what the job writes."""

    def __init__(self, path: Path | None = None, space: FreeSpace | None = None) -> None:
        self.path = path or Path(tempfile.gettempdir())
        self.space = space or FreeSpace()

    @contextmanager
    def folder(
        self, prefix: str, size_bytes: int, *others: tuple[Path | None, int]
    ) -> Iterator[Path]:
        """A new folder, deleted with all that is in it at the end. Raises NoRoom, OSError.

        size_bytes: most bytes that will be in it.   others: what the job writes elsewhere, as
        FreeSpace.promise takes it.
        """
        with self.space.promise((self.path, size_bytes), *others), naming_full():
            # The folder may have been deleted; nothing in it outlives its job.
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=prefix, dir=self.path) as name:
                yield Path(name)
