"""Seconds of test files, for the order of `make test` and the choice of `make test-fast`."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

TABLE = Path(__file__).with_name("seconds.json")
"""Wall seconds of each file that takes a second or more; `make order` writes it from a run."""

_ONE_STACK = re.compile(r"tests/(ray|clients|e2e/\w+)(?=/)")
"""Folders whose files share a stack of processes, which their conftest.py starts."""

_USUAL_S = 0.3
"""Assumed seconds of a file that is not in the table."""
_FAST_S = 1.5
"""Files that take longer are left out of `make test-fast`."""
_STARTING = ("tests/e2e", "tests/pairs", "tests/crash", "tests/ray", "tests/clients")
"""Folders of tests that start servers, and are left out of `make test-fast` however short."""

SECONDS: dict[str, float] = json.loads(TABLE.read_text())


def scope_of(nodeid: str) -> str:
    """Return the file or folder that one worker runs alone, so that its fixtures are made once."""
    file = nodeid.partition("::")[0]
    shared = _ONE_STACK.match(file)
    return shared[0] if shared else file


def seconds(nodeids: Iterable[str]) -> float:
    """Return how long the tests of a scope are expected to take."""
    files = {nodeid.partition("::")[0] for nodeid in nodeids}
    return sum(SECONDS.get(file, _USUAL_S) for file in files)


def is_fast(path: str) -> bool:
    """Whether `make test-fast` looks into a file or folder, by its path from the root."""
    return path not in _STARTING and SECONDS.get(path, 0.0) <= _FAST_S
