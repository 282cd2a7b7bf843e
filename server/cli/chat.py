"""`chorale chat`: talk to the base model or an adapter from the terminal."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from server.cli.terminal import CommandFailed, say
from server.text.json_object import JsonObject

if TYPE_CHECKING:
    from server.client.http import Client

_PROMPT = "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK} "


def chat(
    client: "Client",
    model: Annotated[str, typer.Option(help="Id of the base model, or name of an adapter.")],
    system: Annotated[
        str | None, typer.Option(help="System message at the start of the chat.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="0 takes the likeliest token each time.")
    ] = 0.0,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of one answer; by default what the context leaves."),
    ] = None,
) -> None:
    """Chat with a model. /new starts over; Ctrl-C ends an answer, Ctrl-D ends the chat."""
    start = [{"role": "system", "content": system}] if system else []
    options = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
    options = {name: value for name, value in options.items() if value is not None}
    messages = list(start)
    found = client.request("GET", f"/v1/models/{model}")  # refuses a wrong name before a prompt
    if shutdown := found.get("shutdown_date"):
        raise CommandFailed(f"{model} was deleted on {shutdown}.")
    while (line := _read_line()) is not None:
        if line == "/new":
            messages = list(start)
        elif line:
            messages.append({"role": "user", "content": line})
            _take_turn(client, messages, options)


def _read_line() -> str | None:
    """The line that the user typed; None at the end of the input."""
    try:
        return input(_PROMPT if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _take_turn(client: "Client", messages: list[dict[str, str]], options: JsonObject) -> None:
    """Stream the answer to the last message and append it; a refused message is removed."""
    from server.client.http import ApiRefused

    answer = ""
    body = {**options, "messages": messages, "stream": True}
    stream = client.stream("/v1/chat/completions", body)
    try:
        for chunk in stream:
            for choice in chunk["choices"]:
                text = choice["delta"].get("content") or ""
                answer += text
                sys.stdout.write(text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        stream.close()  # the server ends the request when its client is gone
    except ApiRefused as error:
        messages.pop()
        hint = "; /new starts over" if error.code == "context_length_exceeded" else ""
        say(f"[red]{escape(str(error))}[/red]{hint}")
        return
    sys.stdout.write("\n")
    messages.append({"role": "assistant", "content": answer})
