"""A benchmark writes a row, and every benchmark still finds what it measures."""

import ast
import importlib
import json
import pkgutil
from pathlib import Path

import pytest

import bench
from bench.billing.reading import Reading
from bench.billing.settles import Settles
from bench.measurement import Measurement, changed_by, in_turns, write_row
from bench.scheduling import PrefixCache

OPTIONAL = {"openvino", "openvino_genai", "optimum", "gguf"}
"""Packages that some benchmarks need and that are not among those for development."""
SCRIPTS = {"bench.peers.gguf_convert"}
"""Modules that work as soon as they are imported."""
FOLDER = Path(bench.__file__).parent


def test_every_module_of_the_benchmarks_finds_what_it_imports() -> None:
    absent = {}
    for module in pkgutil.walk_packages(bench.__path__, "bench."):
        if module.name in SCRIPTS:
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            absent[module.name] = error.name
    assert set(absent.values()) <= OPTIONAL, absent


def test_benchmarks_need_nothing_of_the_tests() -> None:
    imported = {
        (str(path.relative_to(FOLDER)), name)
        for path in FOLDER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _imported(node)
    }
    assert not {(path, name) for path, name in imported if name.partition(".")[0] == "tests"}


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


SMALL: dict[str, Measurement] = {
    "scheduling.prefix": PrefixCache(stack="tiny", shared_tokens=96, requests=3),
    "billing.settles": Settles(requests=9, warm_up=2, databases=("sqlite",)),
    "billing.reading": Reading(entries=40, tenants=3),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_measurement_yields_a_row_of_its_setup(name: str, tmp_path: Path) -> None:
    (row,) = SMALL[name].rows(name, tmp_path)
    assert row[0] == name
    assert row[1].items() >= SMALL[name].setup().items()
    assert row[2]


def test_a_hit_of_the_prefix_cache_is_compared_with_the_miss_of_its_run(tmp_path: Path) -> None:
    ((_, _, found),) = SMALL["scheduling.prefix"].rows("scheduling.prefix", tmp_path)
    ratio = found["hit_ttft_ms"]["p50"] / found["miss_ttft_ms"]
    assert found["hit_to_miss"] == pytest.approx(ratio, rel=1e-2)


def test_the_command_line_changes_fields_of_all_measurements_that_have_them() -> None:
    given = [("requests", 7), ("databases", "sqlite"), ("commit_delays_ms", 3)]
    changed = changed_by({"a": Settles(), "b": PrefixCache(), "c": Reading()}, given)
    assert changed["a"] == Settles(requests=7, databases=("sqlite",), commit_delays_ms=(3,))
    assert changed["b"] == PrefixCache(requests=7)
    assert changed["c"] == Reading()
    with pytest.raises(SystemExit, match="no measurement has the field wings"):
        changed_by({"a": Settles()}, [("wings", 2)])


def test_sides_take_turns() -> None:
    order: list[str] = []
    sides = [lambda name=name: order.append(name) or name.upper() for name in "ab"]
    assert in_turns(2, *sides) == [["A", "A"], ["B", "B"]]
    assert order == ["a", "b", "a", "b"]


def test_a_row_takes_the_place_of_the_one_with_the_same_setup(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    cases = [("a", 1, 0), ("b", 1, 1), ("a", 2, 2), ("a", 1, 3)]
    for name, size, number in cases:
        write_row((name, {"size": size, "version": number}, {"n": number}), path, ["size"])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["result"]["n"] for row in rows] == [1, 2, 3]
    write_row(("a", {}, {"n": 4}), path, [])
    assert [json.loads(line)["bench"] for line in path.read_text().splitlines()] == ["b", "a"]
