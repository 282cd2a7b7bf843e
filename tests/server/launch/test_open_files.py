"""The limit of open files, in processes of their own, since a hard limit cannot be raised again."""

import subprocess
import sys

CODE = """
import resource
from server.launch.open_files import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
print(*(allow_open_files(wanted) for wanted in (32, 100, 1000)), end=" ")
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_limit_is_raised_as_far_as_is_wanted_and_the_system_allows() -> None:
    printed = subprocess.run((sys.executable, "-c", CODE), capture_output=True, text=True)
    assert printed.stdout.split() == ["32", "100", "128", "128", "128"]
