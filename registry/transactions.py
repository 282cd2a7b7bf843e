"""Type of the function by which work with several transactions opens each of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from sqlalchemy import Connection

# Opens a transaction of the caller's database, which commits on leaving and rolls back on an error.
Begin = Callable[[], AbstractContextManager[Connection]]
