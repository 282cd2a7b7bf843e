"""Measurements of the code: the size of its rooms, the imports between them, and what is long.

No measurement is a limit: the exit status is always 0. `--json` prints one JSON object.

An arrow leads from one part to another if any module of the first imports any of the second, also
inside a function or for type checkers only. Blank lines are counted as lines.
"""

import ast
import heapq
import json
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import grimp

ROOT = Path(__file__).parents[1]
HOUSES = ("server", "engine", "registry")
"""The packages whose rooms are measured one by one."""
NUM_SHOWN = 5
_KERNELS = "kernels"
_DECLARING = {"get", "put", "post", "patch", "delete", "api_route", "command", "callback"}
"""Decorators of a router or of a command line, whose functions declare an interface."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef
Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """The text of one file, which is parsed once."""

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def module(self) -> str:
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        return self.path.parts[0]


@dataclass(frozen=True)
class Definition:
    """A class or a function, with its name within its file."""

    source: Source
    name: str
    node: ast.ClassDef | _Function
    is_method: bool

    @property
    def where(self) -> str:
        return f"{self.source.path}:{self.node.lineno}"

    @property
    def num_lines(self) -> int:
        return (self.node.end_lineno or self.node.lineno) - self.node.lineno + 1


def main(arguments: Sequence[str]) -> int:
    found = readings(ROOT)
    if "--json" in arguments:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(_sections(found)))
    return 0


def readings(root: Path) -> dict[str, Any]:
    """Every table by its title: a list of rows with the same columns, or a phrase."""
    packages = _packages(root)
    sources = [source for package in packages for source in _read(root, package)]
    tests = list(_read(root, "tests"))
    graph = grimp.build_graph(*packages, cache_dir=None)
    of_packages = _arrows(graph, packages)
    rooms = {house: sorted(graph.find_children(house)) for house in HOUSES}
    of_rooms = {house: _arrows(graph, own) for house, own in rooms.items()}
    definitions = [definition for source in sources for definition in _definitions(source)]
    return {
        "packages in short": f"{len(packages)} packages, {len(of_packages)} arrows",
        "packages": _parts(packages, of_packages, sources),
        "rooms in short": "; ".join(
            f"{len(own)} rooms of {house}, {len(of_rooms[house])} arrows"
            for house, own in rooms.items()
        ),
        "rooms": [
            row for house, own in rooms.items() for row in _parts(own, of_rooms[house], sources)
        ],
        "longest files": _longest_files(sources),
        **_longest_definitions(definitions),
        **_most_parameters(definitions),
        "Any in annotations": [_count_any(package, sources) for package in packages],
        "test lines": _test_lines(packages, sources, tests),
    }


def _packages(root: Path) -> list[str]:
    """The root packages of the import contracts."""
    options = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
    return list(options["root_packages"])


def _read(root: Path, package: str) -> Iterator[Source]:
    for path in sorted((root / package).rglob("*.py")):
        yield Source(path.relative_to(root), path.read_text())


# ---- parts and arrows ----


def _arrows(graph: grimp.ImportGraph, parts: Sequence[str]) -> list[tuple[str, str]]:
    """Every (importer, imported) of two different parts."""
    owners = {module: part for part in parts for module in (part, *graph.find_descendants(part))}
    pairs = {
        (owner, owners[imported])
        for module, owner in owners.items()
        for imported in graph.find_modules_directly_imported_by(module)
        if imported in owners
    }
    return sorted((importer, imported) for importer, imported in pairs if importer != imported)


def _parts(
    parts: Sequence[str], arrows: Sequence[tuple[str, str]], sources: Sequence[Source]
) -> list[Row]:
    """A row for each part. The arrows of the package's own `__init__` count for no room."""
    rows = []
    for part in parts:
        own = [source for source in sources if f"{source.module}.".startswith(f"{part}.")]
        imported_by = [importer for importer, imported in arrows if imported == part]
        imports = [imported for importer, imported in arrows if importer == part]
        rows.append(
            {
                "part": part,
                "lines": sum(source.num_lines for source in own),
                "files": len(own),
                "in": len(imported_by),
                "out": len(imports),
                "both": len(imported_by) + len(imports),
                "imports": " ".join(name.rpartition(".")[2] for name in imports),
            }
        )
    return rows


# ---- what is long ----


def _definitions(source: Source) -> Iterator[Definition]:
    def walk(node: ast.AST, prefix: str) -> Iterator[Definition]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | _Function):
                name = prefix + child.name
                yield Definition(source, name, child, isinstance(node, ast.ClassDef))
                yield from walk(child, f"{name}.")
            else:
                yield from walk(child, prefix)

    return walk(source.tree, "")


def _longest_files(sources: Sequence[Source]) -> list[Row]:
    longest = _most(sources, lambda source: source.num_lines)
    return [{"file": str(source.path), "lines": source.num_lines} for source in longest]


def _longest_definitions(definitions: Sequence[Definition]) -> dict[str, list[Row]]:
    classes = [each for each in definitions if isinstance(each.node, ast.ClassDef)]
    functions = [each for each in definitions if isinstance(each.node, _Function)]

    def row(each: Definition) -> Row:
        return {"name": each.name, "lines": each.num_lines, "where": each.where}

    def class_row(each: Definition) -> Row:
        return {"name": each.name, "methods": _num_methods(each), **row(each)}

    return {
        "classes with most methods": [class_row(each) for each in _most(classes, _num_methods)],
        "longest classes": [class_row(each) for each in _most(classes, _num_lines)],
        "longest functions": [row(each) for each in _most(functions, _num_lines)],
    }


def _num_lines(definition: Definition) -> int:
    return definition.num_lines


def _num_methods(definition: Definition) -> int:
    return sum(isinstance(child, _Function) for child in ast.iter_child_nodes(definition.node))


def _most(found: Iterable[Any], size: Callable[[Any], int]) -> list[Any]:
    """The NUM_SHOWN largest, the largest first; equal ones stay in their order."""
    return heapq.nlargest(NUM_SHOWN, found, key=size)


# ---- parameters ----


def _most_parameters(definitions: Sequence[Definition]) -> dict[str, list[Row]]:
    """Functions outside the kernels; endpoints and commands have a table of their own."""
    functions = [
        each
        for each in definitions
        if isinstance(each.node, _Function) and each.source.package != _KERNELS
    ]
    declared = [each for each in functions if _is_declaration(each.node)]
    called = [each for each in functions if not _is_declaration(each.node)]

    def rows(found: Sequence[Definition]) -> list[Row]:
        return [
            {"name": each.name, "parameters": _num_parameters(each), "where": each.where}
            for each in _most(found, _num_parameters)
        ]

    return {
        "most parameters": rows(called),
        "most parameters of endpoints and commands": rows(declared),
    }


def _num_parameters(definition: Definition) -> int:
    """Number of parameters without `self` and `cls`."""
    arguments = list(_arguments(definition.node))
    is_bound = definition.is_method and arguments and arguments[0].arg in ("self", "cls")
    return len(arguments) - bool(is_bound)


def _arguments(node: ast.AST) -> Iterator[ast.arg]:
    assert isinstance(node, _Function)
    found = node.args
    yield from (*found.posonlyargs, *found.args, *found.kwonlyargs)
    yield from (each for each in (found.vararg, found.kwarg) if each)


def _is_declaration(node: ast.AST) -> bool:
    assert isinstance(node, _Function)
    decorators = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
    if any(isinstance(each, ast.Attribute) and each.attr in _DECLARING for each in decorators):
        return True
    annotations = [each.annotation for each in _arguments(node) if each.annotation]
    return any("typer." in ast.unparse(each) for each in annotations)


# ---- types and tests ----


def _count_any(package: str, sources: Sequence[Source]) -> Row:
    own = [source for source in sources if source.package == package]
    annotations = [each for source in own for each in _annotations(source.tree)]
    return {
        "package": package,
        "Any": sum(_num_any(each) for each in annotations),
        "annotations": len(annotations),
    }


def _annotations(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            yield node.annotation
        elif isinstance(node, _Function) and node.returns:
            yield node.returns


def _num_any(annotation: ast.expr) -> int:
    """How often `Any` is written in an annotation, quoted parts included."""
    found = 0
    for node in ast.walk(annotation):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += (
                node.value.replace("[", " ")
                .replace("]", " ")
                .replace(",", " ")
                .split()
                .count("Any")
            )
        found += isinstance(node, ast.Name) and node.id == "Any"
    return found


def _test_lines(
    packages: Sequence[str], sources: Sequence[Source], tests: Sequence[Source]
) -> list[Row]:
    """Lines of code and tests; a package's tests are in the folder of its name, others apart."""

    def row(package: str, core: Iterable[Source], its_tests: Iterable[Source]) -> Row:
        lines = sum(source.num_lines for source in core)
        test_lines = sum(source.num_lines for source in its_tests)
        per_line = round(test_lines / lines, 2) if lines else None
        return {"package": package, "core": lines, "tests": test_lines, "per core line": per_line}

    rows = [
        row(
            package,
            [source for source in sources if source.package == package],
            [source for source in tests if source.path.parts[1] == package],
        )
        for package in packages
    ]
    others = [source for source in tests if source.path.parts[1] not in packages]
    return [*rows, row("(the whole)", [], others), row("(sum)", sources, tests)]


# ---- tables for a terminal ----


def _sections(found: Mapping[str, Any]) -> Iterator[str]:
    for title, value in found.items():
        if isinstance(value, str):
            yield f"{value}\n"
        else:
            yield f"{title[0].upper()}{title[1:]}\n{_table(value)}"


def _table(rows: Sequence[Row]) -> str:
    columns = list(rows[0])
    cells = [columns, *([_cell(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    is_number = [isinstance(rows[0][column], int | float) for column in columns]
    return (
        "\n".join(
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(line, widths, is_number, strict=True)
            ).rstrip()
            for line in cells
        )
        + "\n"
    )


def _cell(value: Any) -> str:
    return "-" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
