"""The files of deploy/ as their tools read them: compose's variables, a Dockerfile's steps."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.launch.settings import Settings, load_settings

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
GUIDE = ROOT / "docs" / "operator"
# A value like those of `openssl rand -hex 32`, which stands in for every variable left empty.
FILLED = "ab" * 32

_VARIABLE = re.compile(r"\$\{(\w+)(?::([?-])([^}]*))?\}")


class MissingVariable(Exception):
    """A variable without value, for which compose would refuse to start."""


def example_variables() -> dict[str, str]:
    """Return the variables of env.example; those that it leaves empty are empty."""
    lines = (DEPLOY / "env.example").read_text().splitlines()
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def filled_variables() -> dict[str, str]:
    """Return the variables of env.example with the empty ones filled in, as by an operator."""
    return {name: value or FILLED for name, value in example_variables().items()}


def interpolate(text: str, variables: dict[str, str]) -> str:
    """Replace `${A}`, `${A:-default}`, `${A:?message}` as compose does. Raises MissingVariable."""

    def value_of(found: re.Match[str]) -> str:
        name, kind, word = found.groups()
        if value := variables.get(name):
            return value
        if kind != "-":
            raise MissingVariable(name)
        return str(word)

    return _VARIABLE.sub(value_of, text)


@dataclass(frozen=True)
class Compose:
    """compose.yaml with its variables replaced. machines: the services that run Chorale."""

    document: dict[str, Any]

    @classmethod
    def read(cls, variables: dict[str, str]) -> "Compose":
        document = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
        return cls(_map_text(document, lambda text: interpolate(text, variables)))

    @property
    def services(self) -> dict[str, dict[str, Any]]:
        return dict(self.document["services"])

    @property
    def machines(self) -> dict[str, dict[str, Any]]:
        return {name: s for name, s in self.services.items() if "build" in s}


def _map_text(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return {key: _map_text(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_map_text(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value


def dockerfile_steps() -> list[tuple[str, str]]:
    """Return (instruction, rest) of every step, in order; continued lines are joined."""
    text = (DEPLOY / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.partition(" ")[2]) for line in joined.splitlines()]


def image_environment() -> dict[str, str]:
    """Return the variables that the last stage of the Dockerfile sets."""
    found: dict[str, str] = {}
    for instruction, rest in dockerfile_steps():
        if instruction == "FROM":
            found = {}
        elif instruction == "ENV":
            found |= dict(pair.split("=", 1) for pair in rest.split())
    return found


def settle(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> Settings:
    """Return the settings of `chorale serve` with this environment."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return load_settings({})


def texts() -> dict[Path, str]:
    """Return every file that an operator reads or runs, with its text."""
    paths = [path for path in sorted(DEPLOY.rglob("*")) if path.is_file()]
    return {path: path.read_text() for path in [*paths, *sorted(GUIDE.glob("*.md"))]}


def guide() -> str:
    """The operator's pages, one after the other."""
    return "\n".join(path.read_text() for path in sorted(GUIDE.glob("*.md")))
