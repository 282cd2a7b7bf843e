"""Every example of docs/operator/planning.md prints what the page says."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.cli.main import app

PAGE = Path(__file__).parents[3] / "docs" / "operator" / "planning.md"
EXAMPLE = re.compile(r"<!-- plan -->\n```sh\nchorale ([^\n]*)\n```\n\n```text\n(.*?)```", re.DOTALL)


def examples() -> list[tuple[str, str]]:
    return EXAMPLE.findall(PAGE.read_text())


def printed(command: str) -> str:
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.output
    return "".join(f"{line.rstrip()}\n" for line in result.stdout.splitlines())


def test_the_questions_of_the_page_are_all_asked() -> None:
    text = PAGE.read_text()
    assert len(examples()) == text.count("<!-- plan -->") == 5


@pytest.mark.parametrize(("command", "output"), examples(), ids=lambda text: text[:60])
def test_an_example_prints_what_the_page_says(command: str, output: str) -> None:
    assert printed(command) == output
