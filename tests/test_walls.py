"""Every import contract of pyproject.toml is a wall: imports that it forbids break it.

The graph of all imports is built once. A proof adds one import to a copy of the graph and checks it
with import-linter's own classes. A contract of a type that has no proof here fails the tests.
"""

import itertools
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import grimp
import pytest
from importlinter.api import read_configuration
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.layers import LayersContract
from importlinter.domain.contract import Contract

from tests.deployment_files import ROOT

CONFIGURATION = read_configuration(str(ROOT / "pyproject.toml"))
SESSION = CONFIGURATION["session_options"]
CONTRACTS = {options["name"]: options for options in CONFIGURATION["contracts_options"]}

Import = tuple[str, str]
"""The importing module, and the module it imports."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(
        *SESSION["root_packages"], include_external_packages=True, cache_dir=None
    )


# ---- what a contract forbids ----


def forbidden_imports(options: dict[str, Any]) -> Iterator[Import]:
    """Yield imports in which each source and each forbidden module comes once at least."""
    sources, forbidden = options["source_modules"], options["forbidden_modules"]
    pairs = zip(itertools.cycle(sources), itertools.cycle(forbidden), strict=False)
    yield from itertools.islice(pairs, max(len(sources), len(forbidden)))


def upward_imports(options: dict[str, Any]) -> Iterator[Import]:
    """Yield an import from each layer to the one above it, and between parts of one layer."""
    for container in options.get("containers", [""]):
        layers = [
            [f"{container}.{name.strip()}".strip(".") for name in layer.split("|")]
            for layer in options["layers"]
        ]
        for higher, lower in itertools.pairwise(layers):
            yield lower[-1], higher[0]
        for first, *_, last in (layer for layer in layers if len(layer) > 1):
            yield first, last
            yield last, first


PROOFS: dict[str, tuple[type[Contract], Callable[[dict[str, Any]], Iterator[Import]]]] = {
    "forbidden": (ForbiddenContract, forbidden_imports),
    "layers": (LayersContract, upward_imports),
}


# ---- a graph with one more import ----


def with_import(graph: grimp.ImportGraph, added: Import) -> grimp.ImportGraph:
    """Return a copy in which a new file of the importer has the import; no file imports it."""
    importer, imported = added
    copy = deepcopy(graph)
    # The new file is in the innermost package: an exhaustive contract refuses a file beside rooms.
    while packages := [each for each in copy.find_children(importer) if copy.find_children(each)]:
        importer = min(packages)
    if copy.find_children(importer):
        importer += ".a_new_file"
        copy.add_module(importer)
    if imported not in copy.modules:
        copy.add_module(imported, is_squashed=True)
    copy.add_import(importer=importer, imported=imported, line_number=1, line_contents="import")
    return copy


def is_kept(name: str, graph: grimp.ImportGraph) -> bool:
    options = CONTRACTS[name]
    contract_type, _ = PROOFS[options["type"]]
    contract = contract_type(name, SESSION, options)
    # A check may remove ignored imports from its graph, so it gets a copy.
    return contract.check(deepcopy(graph), verbose=False).kept


def proofs(name: str) -> list[Import]:
    _, imports_of = PROOFS[CONTRACTS[name]["type"]]
    return list(imports_of(CONTRACTS[name]))


# ---- proofs ----


@pytest.mark.parametrize("name", CONTRACTS)
def test_an_import_that_a_contract_forbids_breaks_it(name: str, graph: grimp.ImportGraph) -> None:
    assert is_kept(name, graph)
    forbidden = proofs(name)
    assert forbidden
    let_through = [added for added in forbidden if is_kept(name, with_import(graph, added))]
    assert let_through == []


def test_each_forbidden_module_is_imported_by_somebody(graph: grimp.ImportGraph) -> None:
    """The names of forbidden modules must exist: a misspelt name would forbid nothing."""
    named = {
        module for options in CONTRACTS.values() for module in options.get("forbidden_modules", ())
    }
    assert named - graph.modules == set()


@pytest.mark.parametrize(
    "name", [name for name, options in CONTRACTS.items() if options.get("exhaustive")]
)
def test_a_room_without_a_layer_breaks_an_exhaustive_contract(
    name: str, graph: grimp.ImportGraph
) -> None:
    for container in CONTRACTS[name]["containers"]:
        copy = deepcopy(graph)
        copy.add_module(f"{container}.a_new_room")
        assert not is_kept(name, copy)
