"""Output of commands: results go to stdout, everything about their progress to stderr."""

import errno
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from registry.extras import ExtraMissing

_UNLIMITED_WIDTH = 10_000
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?", re.ASCII)
# What to do about a file that the system refuses.
_FILE_REMEDIES = {
    errno.EACCES: "Give this user the right to it, or give another path.",
    errno.ENOENT: "Check the path.",
    errno.ENOSPC: "Make room on its disk.",
}


class CommandFailed(Exception):
    """Ends the command with one line and an exit code; 2 means that it was called wrongly."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        self.exit_code = exit_code
        super().__init__(message)


class OneLineErrors(TyperGroup):
    """A group whose commands end with an error of one line, not with a stack trace."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CommandFailed as error:
            failed = error
        except ExtraMissing as error:
            failed = CommandFailed(str(error))
        except OSError as error:
            # A disk that gets full while a file is written is not named.
            if error.filename is None and error.errno != errno.ENOSPC:
                raise
            remedy = _FILE_REMEDIES.get(error.errno or 0, "Give another path.")
            said = f"{error.filename or 'A file'}: {error.strerror}. {remedy}"
            failed = CommandFailed(said, exit_code=2 if error.errno == errno.ENOENT else 1)
        say(f"[red]Error:[/red] {escape(str(failed))}")
        raise typer.Exit(failed.exit_code)


def confirm(question: str) -> None:
    """Ask before something is done. Raises CommandFailed on a no, or where there is no terminal."""
    if not sys.stdin.isatty():
        raise CommandFailed("There is no terminal to ask for a yes; give --yes.", exit_code=2)
    if not typer.confirm(question, err=True):
        raise CommandFailed("Nothing was done.")


def say(markup: str) -> None:
    """Print a line about the progress to stderr."""
    stderr().print(markup, soft_wrap=True, highlight=False)


def stderr() -> Console:
    # The console is made at each use, since tests and pipes replace the stream.
    return Console(stderr=True)


def show(text: str) -> None:
    """Print a line of the result to stdout, without markup."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def show_json(value: Any) -> None:
    show(json.dumps(value, indent=2, ensure_ascii=False))


def show_table(
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    style: Callable[[Mapping[str, Any]], str] = lambda _: "",
) -> None:
    """Print one line for each row; a missing value is a dash.   style: of a row, on a terminal."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        there = [str(value) for row in rows if (value := row.get(column)) is not None]
        is_number = bool(there) and all(map(_NUMBER.fullmatch, there))
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns), style=style(row))
    # In a pipe or a file every row must stay one line.
    Console(width=None if sys.stdout.isatty() else _UNLIMITED_WIDTH).print(table)


def show_facts(title: str, facts: Sequence[tuple[str, Any]]) -> None:
    """Print facts about one thing, each on a line with its name."""
    show_table((title, ""), [{title: name, "": _cell(fact)} for name, fact in facts])


def _cell(value: Any) -> str:
    match value:
        case None | "" | []:
            return "-"
        case list():
            return escape(", ".join(str(item) for item in value))
        case dict():
            return escape(", ".join(f"{key}={item}" for key, item in value.items()))
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
    return escape(str(value))
