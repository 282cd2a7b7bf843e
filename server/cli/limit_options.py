"""The limits that tenants and keys share, as options of commands."""

from typing import Annotated

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
