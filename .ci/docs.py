"""Builds the site of docs/ in build/docs; every link, anchor and code block is checked.

`make docs` builds it, `make check` builds it for the checks alone. Blocks that follow the line
`<!-- runs -->` are run as well, by tests/e2e/test_docs.py.
"""

import functools
import json
import logging
import re
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
from typer import BadParameter
from typer.main import get_command

from server.cli.main import app as command_line
from server.launch.settings import Settings

ROOT = Path(__file__).parents[1]

_COMMAND_LINE: Any = get_command(command_line)
_USAGE_ERROR: Any = BadParameter.__mro__[1]  # typer has no name for it
_BLOCK = re.compile(
    r"(?P<runs><!-- runs -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A fenced block of code. runs: whether the tests run it. line: of its first line of code."""

    path: Path
    line: int
    language: str
    text: str
    runs: bool


def main(arguments: Sequence[str]) -> int:
    """`--check` throws the site away. Returns 1 if anything is wrong, after saying what."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    faults = [fault for path in pages() for fault in faults_of_page(path)]
    sys.stderr.writelines(f"{fault}\n" for fault in faults)
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) if "--check" in arguments else ROOT / "build" / "docs"
        try:
            build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(site), strict=True))
        except Abort:
            return 1
    return 1 if faults else 0


def pages() -> list[Path]:
    """Every document for people: those at the root, docs/, and those of bench/."""
    folders = (ROOT.glob("*.md"), ROOT.glob("docs/**/*.md"), ROOT.glob("bench/*.md"))
    return sorted(path for paths in folders for path in paths)


def faults_of_page(path: Path) -> Iterator[str]:
    """Faults of a page's blocks, and of the commands anywhere in it."""
    for block in blocks(path):
        yield from faults_of(block)
    for fault in (*check_commands(path.read_text()), *check_endpoints(path.read_text())):
        yield f"{path.relative_to(ROOT)}: {fault}"


def blocks(path: Path) -> Iterator[Block]:
    text = path.read_text()
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("text")) + 1
        yield Block(path, line, found["language"], found["text"], found["runs"] is not None)


def faults_of(block: Block) -> Iterator[str]:
    """Faults of a block, each with its place."""
    check = _CHECKS.get(block.language)
    for fault in check(block.text) if check else ():
        yield f"{block.path.relative_to(ROOT)}:{block.line}: {fault}"


def _check_json(text: str) -> Iterator[str]:
    try:
        json.loads(text)
    except ValueError as error:
        yield f"this is not JSON: {error}"


def _check_toml(text: str) -> Iterator[str]:
    try:
        keys = tomllib.loads(text)
    except ValueError as error:
        yield f"this is not TOML: {error}"
        return
    for key in sorted(keys.keys() - Settings.model_fields.keys()):
        yield f"there is no setting {key}"


def _check_python(text: str) -> Iterator[str]:
    try:
        compile(text, "block", "exec")
    except SyntaxError as error:
        yield f"this is not Python: {error}"


def check_commands(text: str) -> Iterator[str]:
    """Commands and flags of `chorale` that do not exist, in a script or in a page."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in re.findall(r"(?:^|[`\s(])chorale ((?:[a-z-]+ ?)[^`\n#|>]*)", joined, re.MULTILINE):
        words = line.split()
        command = _COMMAND_LINE
        if words[0] not in command.commands:
            continue  # prose
        while words and hasattr(command, "commands"):
            if command.invoke_without_command and words[0].startswith("--"):
                break
            command = command.commands.get(words.pop(0))
        if command is None:
            yield f"there is no command `chorale {line.strip()}`"
            continue
        options = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
        for flag in (word.partition("=")[0] for word in words):
            if flag.startswith("--") and flag not in options | {"--help"}:
                yield f"`chorale {line.strip()}` has a flag that does not exist: {flag}"


def _check_shell(text: str) -> Iterator[str]:
    """Calls of `chorale` in a script that its own parser refuses."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in re.findall(r"(?:^|[\s(;&|])chorale ([a-z-][^\n|>;&)]*)", joined, re.MULTILINE):
        words, command = shlex.split(line, comments=True), _COMMAND_LINE
        while words and words[0] in getattr(command, "commands", ()):
            command = command.commands[words.pop(0)]
        if command is not _COMMAND_LINE:  # else it is prose, or a flag of `chorale` itself
            try:
                command.make_context("chorale", words)
            except _USAGE_ERROR as error:
                yield f"`chorale {line.strip()}`: {error.format_message()}"


def check_endpoints(text: str) -> Iterator[str]:
    """Endpoints, named with their method, that the server does not have."""
    for method, path in re.findall(r"\b(GET|POST|PUT|PATCH|DELETE) (/[^\s`\"',)]*)", text):
        path = path.partition("?")[0].rstrip(".:;")
        if not any(method == known and route.fullmatch(path) for known, route in _endpoints()):
            yield f"there is no endpoint {method} {path}"


@functools.cache
def _endpoints() -> list[tuple[str, re.Pattern[str]]]:
    """Each endpoint's method and the form of its path, in which values may stand for names."""
    # `make check` compares the page with the code.
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    rows = re.findall(r"^\| ([A-Z]+) \| `([^`]+)` \|", page, re.MULTILINE)
    return [(name, re.compile(re.sub(r"\{\w+\}", "[^/]+", path))) for name, path in rows]


_CHECKS: dict[str, Callable[[str], Iterator[str]]] = {
    "json": _check_json,
    "toml": _check_toml,
    "python": _check_python,
    "sh": _check_shell,
}
"""How a block of each language is checked. Others are commands, pictures or output."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
