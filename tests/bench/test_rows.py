"""A benchmark writes a row, and every benchmark still finds what it measures."""

import importlib
import json
import pkgutil
from pathlib import Path

import pytest

import bench
from bench.experiment import replace_rows, row
from bench.headlines.shared_prefix import SharedPrefix

OPTIONAL = {"matplotlib", "openvino", "openvino_genai", "optimum", "gguf", "litellm", "bfcl_eval"}
"""Packages that some benchmarks need and that are not among those for development."""
SCRIPTS = {"bench.peers.gguf_convert"}
"""Modules that work as soon as they are imported."""


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


def test_a_row_has_figures_of_its_setup_and_ratios_that_fit_them() -> None:
    tiny = SharedPrefix(stack="tiny", requests=7, prompt_tokens=133, shared_tokens=96)
    found = json.loads(row("headlines.shared-prefix", tiny))
    assert (found["bench"], found["setup"]["requests"]) == ("headlines.shared-prefix", 7)
    cached, without = found["result"]["cached"], found["result"]["without_cache"]
    assert without["computed_prompt_tokens"] == 7 * 133
    assert cached["computed_prompt_tokens"] == 7 * 133 - 6 * 96
    gain = cached["requests_per_s"] / without["requests_per_s"]
    assert found["result"]["gain"] == pytest.approx(gain, rel=1e-2)


def test_a_row_takes_the_place_of_the_one_before_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    cases = (("a", 0), ("b", 0), ("a", 1))
    old, other, new = (json.dumps({"bench": name, "n": n}) + "\n" for name, n in cases)
    replace_rows(path, [old, other])
    replace_rows(path, [new])
    assert path.read_text() == other + new
