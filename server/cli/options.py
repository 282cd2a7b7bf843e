"""Options that several commands share, and commands that do not spell their options out."""

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

RequestsPerMinute = Annotated[
    int | None, typer.Option(help="Requests per minute; no limit by default.")
]
TokensPerMinute = Annotated[
    int | None, typer.Option(help="Tokens per minute; no limit by default.")
]
MaxConcurrency = Annotated[
    int | None, typer.Option(help="Requests under way at once; no limit by default.")
]
Start = Annotated[
    str | None, typer.Option(help="ISO date or Unix seconds; by default the first of this month.")
]
End = Annotated[
    str | None, typer.Option(help="ISO date or Unix seconds, itself not included; by default now.")
]


def set_options(command: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> None:
    """Have typer take these parameters for those of a command, which gets them by name."""
    command.__dict__["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {each.name: each.annotation for each in parameters}
