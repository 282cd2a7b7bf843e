"""`make house` counts correctly in a file that is small enough to count by hand."""

from pathlib import Path
from typing import Any

import grimp
import pytest

from tests.ci_scripts import load_script

house = load_script("house")

ROOM = '''"""A room."""

from typing import Annotated, Any

import typer


class Table:
    rows: list[Any]

    def add(self, row: "dict[str, Any]", *, twice: bool = False) -> None: ...

    def clear(self) -> None:
        def each(row: Any, *rest: int, **named: int) -> Any: ...


@router.get("/rows")
def endpoint(a: int, b: int, c: int, d: int) -> None: ...


def command(a: Annotated[int, typer.Option()], b: int, c: int, d: int, e: int) -> None: ...
'''


@pytest.fixture
def definitions() -> list[Any]:
    return list(house._definitions(house.Source(Path("server/room.py"), ROOM)))


def test_methods_and_lines_are_counted_by_class(definitions: list[Any]) -> None:
    [table] = house._longest_definitions(definitions)["longest classes"]
    assert table == {"name": "Table", "methods": 2, "lines": 7, "where": "server/room.py:8"}


def test_self_is_no_parameter_and_endpoints_and_commands_stand_apart(
    definitions: list[Any],
) -> None:
    found = house._most_parameters(definitions)
    called, declared = found.values()
    assert [(row["name"], row["parameters"]) for row in called] == [
        ("Table.clear.each", 3), ("Table.add", 2), ("Table.clear", 0),
    ]  # fmt: skip
    assert [row["name"] for row in declared] == ["command", "endpoint"]


def test_any_is_counted_in_quoted_annotations_too() -> None:
    source = house.Source(Path("server/room.py"), ROOM)
    assert house._count_any("server", [source])["Any"] == 4


def test_an_arrow_is_counted_once_and_never_from_a_room_to_itself() -> None:
    graph = grimp.ImportGraph()
    for module in ("house", "house.a", "house.a.x", "house.a.y", "house.b", "house.b.z"):
        graph.add_module(module)
    for importer, imported in (
        ("house.a.x", "house.a.y"), ("house.a.x", "house.b"), ("house.a.y", "house.b.z"),
    ):  # fmt: skip
        graph.add_import(importer=importer, imported=imported)
    assert house._arrows(graph, ["house.a", "house.b"]) == [("house.a", "house.b")]
