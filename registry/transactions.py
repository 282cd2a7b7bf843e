"""How work that takes several transactions, with long steps between them, opens each of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from sqlalchemy import Connection

# Opens a transaction of the caller's database: commits on leaving, rolls back on an exception.
Begin = Callable[[], AbstractContextManager[Connection]]
