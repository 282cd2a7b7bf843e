"""`chorale`: lists every command and the module that has it."""

from typing import Annotated

import typer

from server.cli import (
    account,
    adapters,
    audit,
    backup,
    chat,
    demo,
    doctor,
    engines,
    keys,
    model_routes,
    models,
    operator,
    plan,
    receipts,
    serve,
    simulate,
    statements,
    tenants,
    top,
    usage,
)
from server.cli.api_command import api_command, table
from server.cli.terminal import OneLineErrors, show
from server.version import VERSION


def _show_version(is_asked: bool) -> None:
    if is_asked:
        show(f"chorale {VERSION}")
        raise typer.Exit


app = typer.Typer(
    name="chorale",
    cls=OneLineErrors,
    help="One base model, many voices: serves many tenants' LoRA adapters from one base model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def _chorale(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


app.command("demo")(demo.demo)
app.command("serve")(serve.serve)
app.command("doctor")(doctor.doctor)
app.add_typer(tenants.app, name="tenants")
app.add_typer(keys.app, name="keys")
app.add_typer(operator.prices, name="prices")
app.add_typer(operator.budgets, name="budgets")
app.add_typer(operator.credits, name="credits")
app.add_typer(operator.payments, name="payments")
app.add_typer(operator.corrections, name="corrections")
app.add_typer(operator.audit_log, name="audit-log")
app.add_typer(adapters.app, name="adapters")
app.add_typer(model_routes.app, name="routes")
app.add_typer(engines.app, name="engines")
app.add_typer(models.app, name="models")
api_command(app, "top", operator=True, read_timeout_s=top.READ_TIMEOUT_S)(top.top)
api_command(app, "balance", show=table(account.BALANCE))(account.balance)
api_command(app, "limits", show=account.show_limits)(account.limits)
app.add_typer(usage.app, name="usage")
app.add_typer(receipts.app, name="receipts")
app.add_typer(statements.app, name="statements")
app.add_typer(audit.app, name="audit")
app.command("backup")(backup.backup)
app.command("restore")(backup.restore)
app.command("plan")(plan.plan)
api_command(app, "simulate", operator=True, show=simulate.show_simulation)(simulate.simulate)
api_command(app, "chat")(chat.chat)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
