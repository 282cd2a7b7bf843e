"""pyproject.toml and the files around it give one version and one package name to install."""

import importlib
import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from server.version import VERSION

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

OURS = re.compile(r"chorale-llm\[([a-z0-9,]+)\]")
# The other package's name before extras, before a version, or after `pip install`; not in a path.
STRANGERS = re.compile(
    r"\bchorale(\\?\[[a-z]|[=~>]=[0-9])|pip install [^\n#]*(?<![\w./-])chorale(?![\w./-])"
)


def test_the_version_is_said_in_one_place() -> None:
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    module, _, name = PYPROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"].rpartition(".")
    assert getattr(importlib.import_module(module), name) == VERSION


def test_every_file_that_the_demo_serves_is_package_data() -> None:
    demo, patterns = ROOT / "demo", PYPROJECT["tool"]["setuptools"]["package-data"]["demo"]
    files = {path for path in demo.rglob("*") if path.is_file() and ".py" not in path.suffix}
    assert files == {path for pattern in patterns for path in demo.glob(pattern)}


def test_what_is_to_be_installed_is_ours() -> None:
    """`chorale` on the package index is another project's package; ours is `chorale-llm`."""
    assert PYPROJECT["project"]["name"] == "chorale-llm"
    named = set()
    for path in _text_files():
        text = path.read_text(errors="replace")
        strangers = STRANGERS.search(text)
        assert strangers is None, f"{path}: {strangers and strangers[0]}"
        named |= {extra for extras in OURS.findall(text) for extra in extras.split(",")}
    assert {"gpu", "parquet", "ray"} <= named <= set(PYPROJECT["project"]["optional-dependencies"])


def _text_files() -> Iterator[Path]:
    """Yield every file of the checkout that .gitignore does not name."""
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    for top in ROOT.iterdir():
        if not any(fnmatch(top.name, pattern) for pattern in [*ignored, ".git"]):
            for path in [top, *top.rglob("*")]:
                if path.is_file() and path.suffix not in (".pyc", ".safetensors", ".png"):
                    yield path
