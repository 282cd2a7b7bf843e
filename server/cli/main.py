"""`chorale`: every command, and where it lives."""

import typer

from server.cli import serve
from server.cli.terminal import OneLineErrors

app = typer.Typer(
    name="chorale",
    cls=OneLineErrors,
    help="One base model, many voices: serves many tenants' LoRA adapters from one base model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("serve")(serve.serve)


@app.callback()
def _chorale() -> None:
    """Makes this a group, however few its commands."""


def main() -> None:
    app()


if __name__ == "__main__":
    main()
