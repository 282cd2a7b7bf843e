"""pyproject.toml and the files around it give one version and one package name to install."""

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from kernels.cpu.compiler import find_library, levels_of
from server.version import VERSION, build
from tests import needs

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Extras as they are installed: of a clone, of a wheel's file, and of each other in pyproject.toml.
OURS = re.compile(r"""(?:-e ['"]?\.|WHEEL|\.whl|chorale-llm)\[([a-z0-9,]+)\]""")
NAMED = re.compile(r"\bextras?(?: |\]\([^)]*\) )`([a-z0-9]+)`")
# Ours is on no index, so nobody can install it by its name.
BY_NAME = re.compile(r"pip install [^\n#]*chorale-llm(?![\w./-])")
# The other package's name before extras, before a version, or after `pip install`; not in a path.
STRANGERS = re.compile(
    r"\bchorale(\\?\[[a-z]|[=~>]=[0-9])|pip install [^\n#]*(?<![\w./-])chorale(?![\w./-])"
)


def test_the_version_is_said_in_one_place() -> None:
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    module, _, name = PYPROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"].rpartition(".")
    assert getattr(importlib.import_module(module), name) == VERSION


def test_a_build_is_told_by_its_code_wherever_that_lies(tmp_path: Path) -> None:
    def write(root: str, code: str) -> str:
        for package in ("engine", "server/api"):
            (tmp_path / root / package).mkdir(parents=True, exist_ok=True)
            (tmp_path / root / package / "x.py").write_text(code)
        return build(tmp_path / root)

    assert write("clone", "a") == write("wheel", "a") != write("clone", "b")


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
        assert not BY_NAME.search(text), f"{path} installs by name what is on no index"
        named |= {extra for extras in OURS.findall(text) for extra in extras.split(",")}
        named |= set(NAMED.findall(text)) if path.suffix == ".md" else set()
    assert (
        {"demo", "parquet", "ray", "s3"}
        <= named
        <= set(PYPROJECT["project"]["optional-dependencies"])
    )


def test_a_wheel_carries_the_kernels_and_the_processors_own_are_taken_without_a_compiler(
    tmp_path: Path,
) -> None:
    compiler = needs.program("cc", "gcc")
    quick = tmp_path / "quick-cc"
    quick.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')
    quick.chmod(0o755)
    source = tmp_path / "source"
    shutil.copytree(ROOT / "kernels", source / "kernels")
    (source / "server").mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "server/version.py"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "-w", tmp_path, source]
    subprocess.run(command, check=True, env=os.environ | {"CC": str(quick)})
    (wheel,) = tmp_path.glob("*.whl")
    platform_tag = re.sub(r"[-.]", "_", sysconfig.get_platform())
    assert wheel.stem.partition(f"{VERSION}-")[2] == f"py3-none-{platform_tag}"
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    carried = {path.stem for path in (installed / "kernels" / "cpu" / "lib").iterdir()}
    assert carried == {f"kernels-{level}" for level in levels_of(platform.machine())}
    code = (
        "import ctypes; from kernels.cpu.compiler import find_library; found = find_library(); "
        "ctypes.CDLL(str(found)); print(found)"
    )
    bare = {"PYTHONPATH": str(installed), "PATH": "", "CC": "none", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, env=bare, cwd=tmp_path, capture_output=True)
    found = Path(done.stdout.decode().strip())
    assert found.parent == installed / "kernels" / "cpu" / "lib"
    assert found.stem == find_library().stem.rpartition("-")[0]


def _text_files() -> Iterator[Path]:
    """Yield every file of the checkout that .gitignore does not name."""
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    for top in ROOT.iterdir():
        if not any(fnmatch(top.name, pattern) for pattern in [*ignored, ".git"]):
            for path in [top, *top.rglob("*")]:
                if path.is_file() and path.suffix not in (".pyc", ".safetensors", ".png"):
                    yield path
