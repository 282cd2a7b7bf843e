"""What a command writes: results to stdout, everything about its progress to stderr."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

_UNLIMITED_WIDTH = 10_000


class CommandFailed(Exception):
    """Ends the command with one line and an exit code. 2: it was called wrongly."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        self.exit_code = exit_code
        super().__init__(message)


class OneLineErrors(TyperGroup):
    """A group whose commands end in one line, not in a stack trace."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CommandFailed as error:
            say(f"[red]Error:[/red] {escape(str(error))}")
            raise typer.Exit(error.exit_code) from None


def confirm(question: str) -> None:
    """Ask before something is done. Raises CommandFailed: the answer is no, or nobody is there."""
    if not sys.stdin.isatty():
        raise CommandFailed("There is no terminal to ask for a yes; give --yes.", exit_code=2)
    if not typer.confirm(question, err=True):
        raise CommandFailed("Nothing was done.")


def say(markup: str) -> None:
    """A line for the one who waits, on stderr."""
    stderr().print(markup, soft_wrap=True, highlight=False)


def stderr() -> Console:
    # Made at each use: tests and pipes replace the stream.
    return Console(stderr=True)


def show(text: str) -> None:
    """A line of the result, as it is."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def show_json(value: Any) -> None:
    show(json.dumps(value, indent=2, ensure_ascii=False))


def show_table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """One line a row; what a row lacks is a dash."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        is_number = any(isinstance(row.get(column), int | float) for row in rows)
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    # Into a pipe or a file every row stays one line.
    Console(width=None if sys.stdout.isatty() else _UNLIMITED_WIDTH).print(table)


def show_facts(title: str, facts: Sequence[tuple[str, Any]]) -> None:
    """Of one thing: a name and what it is, on each line."""
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
