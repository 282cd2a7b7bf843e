"""Docstrings that open with a fragment are found wherever Python programs have docstrings."""

import subprocess
from pathlib import Path

import pytest

from tests.ci_scripts import load_script

words = load_script("words")

PROGRAM = '''"""A module."""

LIMIT = 3
"""Of one tenant."""


class Seat:
    """That one holds."""

    tenant: str
    """Its holder."""

    async def give(self) -> None:
        """Give it back."""
        "text that documents nothing"
'''


def test_a_fragment_in_a_file_under_version_control_fails_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "seat.py").write_text(PROGRAM)
    (tmp_path / "draft.py").write_text('"""Of nothing."""\n')
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", "seat.py"], check=True)
    assert words.main([], tmp_path) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "seat.py:4: Of one tenant."
    assert printed[-1] == "3 of 5 docstrings open with a fragment."
