"""Files that are written whole: a reader finds the former content or the new one."""

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Make or replace a file, with mode 0600. Several may write the same one at once.

    sync: whether it has to be on the disk, also after a power cut. Raises OSError, and then the
    former file is there.
    """
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(handle)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
    if sync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
