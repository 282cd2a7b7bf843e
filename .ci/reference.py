"""Writes docs/reference from the code: routes, fields, settings, commands, metrics, dependencies.

`make reference` writes the pages; `--check` only says whether they are current. No engine is
started and no file of a data directory is read.
"""

import ast
import inspect
import io
import json
import re
import sys
import textwrap
import tokenize
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import iter_route_contexts
from prometheus_client.metrics import MetricWrapperBase
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.text import Text
from typer.main import get_command

from server.accounts.auth import USAGE_READ
from server.api import deps
from server.api.app import create_app
from server.api.field_docs import descriptions
from server.api.metrics import Metrics
from server.api.openai import ChatRequest, CompletionRequest
from server.api.request_objects import RequestObject
from server.cli.main import app as command_line
from server.launch.settings import ENV_PREFIX, Settings

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"

_CALLERS: dict[Callable[..., Any], str] = {
    deps.require_admin: "admin key",
    deps.usage_reader: f"tenant key with `{USAGE_READ}`, or admin key",
    deps.authenticate: "tenant key",
}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+(\[[\w,-]+\])?)(?P<versions>[^;]*)(;(?P<marker>.*))?")

Row = tuple[str, ...]


def main(arguments: Sequence[str], folder: Path = FOLDER) -> int:
    status = 0
    for name, page in pages().items():
        path = folder / name
        if "--check" not in arguments:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(page)
        elif not path.is_file() or path.read_text() != page:
            status = 1
            sys.stderr.write(
                f"docs/reference/{name} does not say what the code says: run `make reference` and "
                "commit it.\n"
            )
    return status


def make_app() -> FastAPI:
    """The application with all its routes, around a gateway that cannot answer any request."""
    settings = SimpleNamespace(cors_origins=())
    gateway: Any = SimpleNamespace(settings=settings, metrics=None, tracer=None)
    return create_app(gateway)


def make_metrics() -> Metrics:
    """The metrics of a gateway that has no engine yet."""
    bases: Any = SimpleNamespace(figures=lambda: [], num_deaths=0, current=[])
    settler: Any = SimpleNamespace(lags={})
    return Metrics(bases, settler)


def pages(
    app: FastAPI | None = None, model: type[BaseModel] = Settings, metrics: Metrics | None = None
) -> dict[str, str]:
    """Each page by its file's name. The arguments are for tests, which add to what is shown."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cli: Any = get_command(command_line)
    return {
        "api.md": _page("API", _ABOUT_ROUTES, route_rows(app or make_app())),
        "request-fields.md": _page("Request fields", _ABOUT_FIELDS, field_rows()),
        "settings.md": _page(
            "Settings", _ABOUT_SETTINGS, setting_rows(model, cli.commands["serve"])
        ),
        "commands.md": _page("Commands", _ABOUT_COMMANDS, command_rows(cli)),
        "metrics.md": _page("Metrics", _ABOUT_METRICS, metric_rows(metrics or make_metrics())),
        "dependencies.md": _page(
            "Dependencies",
            f"Chorale needs Python {project['requires-python']} and these packages. Those without "
            "an extra are always installed.",
            dependency_rows(project),
        ),
    }


_ABOUT_ROUTES = (
    "A tenant key is an API key of a tenant, with a scope where one is named; the admin key is the "
    "operator's. A running server has the OpenAPI document at `GET /openapi.json`, and the site of "
    "`make docs` has a page of all endpoints with their parameters, bodies and answers. "
    "[Errors by code](../tenant/errors.md) says what each refusal means."
)
_ABOUT_FIELDS = (
    "These are the fields of `POST /v1/chat/completions` and `POST /v1/completions`. A field that "
    "is not here gets a 400 `unsupported_parameter` with its path, unless its value is null, [] or "
    "{}; [fields that are not known](../tenant/requests.md#fields-that-are-not-known) can be left "
    "out instead. null is the same as no field everywhere."
)
_ABOUT_SETTINGS = (
    "These are the settings of `chorale serve`. Each is also a key of `chorale.toml` and a "
    f"variable `{ENV_PREFIX}<NAME>`; an unknown one is an error. In a variable, `cors_origins` "
    "and `trusted_proxies` have commas between their values, and other lists are JSON. "
    "Flags win over variables, variables over the file that `--config` names; a restart applies "
    "them. Sizes are in bytes, times in seconds. Parentheses say what an unset or derived default "
    "stands for."
)
_ABOUT_COMMANDS = "`chorale COMMAND --help` says more."
_ABOUT_METRICS = (
    "`GET /metrics` has these in Prometheus's format, for `metrics_networks` and the admin key. "
    "With several gateways on a machine, those that each gateway has of its own have a label "
    "`gateway` too. "
    "[Watch and repair](../operator/monitoring.md) says which ones to look at."
)


def _page(title: str, about: str, rows: Iterable[Row]) -> str:
    """A page with a table.   rows: the first one has the names of the columns."""
    columns, *cells = rows
    lines = [_line(row) for row in (columns, ["---"] * len(columns), *cells)]
    written = "<!-- `make reference` writes this page from the code. -->"
    return "\n".join([f"# {title}", "", written, "", about, "", *lines]) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


# ---- routes ----


def route_rows(app: FastAPI) -> Iterator[Row]:
    """A row for each route, sorted by path; HEAD comes with GET and is not shown."""
    yield "method", "path", "who may call", "what it does"
    rows = []
    for route in iter_route_contexts(app.routes):
        assert route.endpoint is not None
        about = getattr(route.original_route, "description", "") or route.endpoint.__doc__
        summary = _first_line(about) or _words(route.endpoint.__name__)
        who = _who_may_call(getattr(route.original_route, "dependant", None) and route.dependant)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            rows.append((route.path_format or str(route.path), method, who, summary))
    for path, method, who, summary in sorted(rows):
        yield method, f"`{path}`", who, summary


def _who_may_call(dependant: Dependant | None) -> str:
    calls = list(_calls(dependant)) if dependant else []
    scopes = sorted({call.scope for call in calls if hasattr(call, "scope")})
    if scopes:
        return f"tenant key with {' and '.join(f'`{scope}`' for scope in scopes)}"
    return next((who for call, who in _CALLERS.items() if call in calls), "anyone, without a key")


def _calls(dependant: Dependant) -> Iterator[Any]:
    """Yields all dependencies, which are called before the route's own function."""
    for part in dependant.dependencies:
        yield part.call
        yield from _calls(part)


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


def _words(name: str) -> str:
    return name.strip("_").replace("_", " ").capitalize()


# ---- fields of requests ----


def field_rows() -> Iterator[Row]:
    """A row for each field of a request for completions, sorted by its path."""
    yield "field", "chat", "text", "what it does"
    chat, text = dict(_fields(ChatRequest)), dict(_fields(CompletionRequest))
    for path in sorted({*chat, *text}):
        absent = ("", "") if re.search(r"\W", path) else ("refused", "")
        told = [found.get(path, absent) for found in (chat, text)]
        served = [about for how, about in told if how == "served"]
        abouts = dict.fromkeys(served or [about for _, about in told if about])
        yield f"`{path}`", *(how for how, _ in told), " In `/v1/completions`: ".join(abouts)


def _fields(kind: type[RequestObject], prefix: str = "") -> Iterator[tuple[str, tuple[str, str]]]:
    """Each field's path, what happens to it, and what it is."""
    names = {info.alias or name: info for name, info in kind.model_fields.items()}
    told: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        told |= descriptions(each.__doc__ or "", names)
    for name, info in names.items():
        yield f"{prefix}{name}", ("served", told[name])
        for inner, mark in _objects(info.annotation):
            yield from _fields(inner, f"{prefix}{name}{mark}.")
    for name, why in kind.without_effect.items():
        yield f"{prefix}{name}", ("accepted", f"Without effect: {why}.")
    for name, values in kind.not_served.items():
        shown = ", ".join(f"`{json.dumps(value)}`" for value in values)
        about = f"Accepted only as {shown}, which asks for nothing." if shown else "Not served."
        yield f"{prefix}{name}", ("refused", about)


def _objects(annotation: Any, mark: str = "") -> Iterator[tuple[type[RequestObject], str]]:
    """The objects that a field may have, with [] for each list that they are in."""
    if isinstance(annotation, type) and issubclass(annotation, RequestObject):
        yield annotation, mark
    mark += "[]" if typing.get_origin(annotation) is list else ""
    for part in typing.get_args(annotation):
        yield from _objects(part, mark)


# ---- settings ----


def setting_rows(model: type[BaseModel], serve: Any) -> Iterator[Row]:
    """A row for each setting, sorted by name.   serve: the command whose flags are settings too."""
    yield "name", "type", "default", "flag", "what it is"
    options = {option.name: option for option in serve.params}
    comments = _comments(model)
    for name, field in sorted(model.model_fields.items()):
        option = options.get(name)
        flag = f"`{option.opts[0]}`" if option else ""
        about = _plain(option.help) if option else ""
        comment = comments.get(name, "")
        if field.default_factory is not None:
            comment = _first_line(field.default_factory.__doc__)
        # With any other default a comment would repeat the flag's help.
        is_in_words = field.default_factory is not None or field.default is None
        if about and comment and is_in_words:
            about = f"{about} ({comment})"
        yield f"`{name}`", _type(field), _default(field), flag, about or comment


def _type(field: FieldInfo) -> str:
    bounds = [
        f"{words} {getattr(limit, attribute)}"
        for limit in field.metadata
        for attribute, words in _BOUNDS.items()
        if hasattr(limit, attribute)
    ]
    return ", ".join([_type_name(field.annotation), *bounds])


def _type_name(annotation: Any) -> str:
    """The type in words for chorale.toml, where `None` cannot be written and so is not shown."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(each) for each in arguments if each is not types.NoneType)
    if origin is dict:
        return "table"
    return "path" if annotation is Path else str(annotation.__name__)


def _default(field: FieldInfo) -> str:
    """The default, in words where it depends on the machine or on other settings."""
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "derived at start"
    match field.default:
        case None:
            return "unset"
        case ():
            return "empty"
        case "":
            return "unset"
        case bool():
            return f"`{str(field.default).lower()}`"
        case tuple():
            return f"`{json.dumps(field.default)}`"
        case default:
            return f"`{default}`"


def _comments(model: type[BaseModel]) -> dict[str, str]:
    """The comment of each field: the lines right above it, then the comment at its line's end."""
    found: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if each.__module__.startswith(("server", "engine", "tests")):
            source = textwrap.dedent(inspect.getsource(each))
            found |= _field_comments(source)
    return found


def _field_comments(source: str) -> dict[str, str]:
    lines = source.splitlines()
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above: list[str] = []
            number = node.lineno - 1
            while number in comments and lines[number - 1].lstrip().startswith("#"):
                above.insert(0, comments[number])
                number -= 1
            behind = comments.get(node.end_lineno or 0, "")
            if above and behind:
                behind = f"({behind})"
            found[node.target.id] = " ".join([*above, behind]).strip()
    return found


def _plain(markup: str | None) -> str:
    return " ".join(Text.from_markup(markup or "").plain.split())


# ---- commands ----


def command_rows(cli: Any) -> Iterator[Row]:
    yield "command", "what it does"
    yield from _commands(cli, "chorale")


def _commands(group: Any, prefix: str) -> Iterator[Row]:
    """A row for each command, sorted by name, groups included; hidden commands are not shown."""
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            if command.invoke_without_command:
                yield f"`{prefix} {name}`", _plain(_first_line(command.help))
            yield from _commands(command, f"{prefix} {name}")
        elif not command.hidden:
            yield f"`{prefix} {name}`", _plain(_first_line(command.help))


# ---- metrics ----


def metric_rows(metrics: Metrics) -> Iterator[Row]:
    """A row for each metric, sorted by name; a counter's name ends in _total, as for Prometheus."""
    yield "name", "type", "labels", "help"
    labels: Mapping[str, Iterable[str]] = {
        family.name: metric._labelnames
        for metric in vars(metrics).values()
        if isinstance(metric, MetricWrapperBase)
        for family in metric.describe()
    }
    families = (*metrics._engines.collect(), *metrics._registry.collect())
    for family in sorted(families, key=lambda family: family.name):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        shown = labels.get(family.name, getattr(family, "_labelnames", ()))
        names = ", ".join(f"`{label}`" for label in shown)
        yield f"`{name}`", family.type, names, family.documentation


# ---- dependencies ----


def dependency_rows(project: Mapping[str, Any]) -> Iterator[Row]:
    """A row for each dependency, sorted by extra and name."""
    yield "extra", "package", "versions", "where"
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    for extra, requirements in sorted(groups.items()):
        for text in sorted(requirements):
            found = _REQUIREMENT.fullmatch(text)
            assert found is not None, text
            cells = (extra, found["name"], found["versions"].strip(), found["marker"] or "")
            yield tuple(f"`{cell.strip()}`" if cell else "" for cell in cells)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
