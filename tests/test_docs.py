"""The documents are short, name what exists, and have a paragraph for each error's code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from registry.uploads.proof import Verdict
from server.inference.errors import FAILURES
from tests.ci_scripts import load_script

docs = load_script("docs")
ROOT = docs.ROOT

NEVER_SENT = {
    "code",  # the client's word for the field
    "passed",  # the verdict on an adapter that has no fault
}
FAULT_MAKERS = {"fault", "_fault", "file_fault"}
"""Functions of the registry whose first argument is a code."""


def paragraphs() -> list[str]:
    text = (ROOT / "docs" / "tenant" / "errors.md").read_text()
    return re.findall(r"^### `(\w+)`\n(?=\S)", text, re.MULTILINE)


def codes() -> set[str]:
    """Every error code of gateway, registry and balancer, and the verdicts of a proof."""
    folders = (ROOT / "server", ROOT / "registry")
    trees = (ast.parse(path.read_text()) for folder in folders for path in folder.rglob("*.py"))
    balancer = re.findall(r'"code":"(\w+)"', (ROOT / "deploy" / "haproxy.cfg").read_text())
    found = {code for tree in trees for code in codes_in(tree)}
    return found | set(balancer) | set(get_args(Verdict)) | set(FAILURES)


def codes_in(tree: ast.Module) -> Iterator[str]:
    """Texts that are passed as `code`, assigned to it, or its default."""
    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg="code", value=value):
                yield from texts_in(value)
            case ast.Assign(targets=[ast.Name(id="code" | "default_code")], value=value):
                yield from texts_in(value)
            case ast.Assign(targets=[ast.Attribute(attr="code")], value=value):
                yield from texts_in(value)
            case ast.Call(func=ast.Name(id=name), args=[ast.Constant(str(code)), *_]):
                if name in FAULT_MAKERS:
                    yield code


def texts_in(value: ast.expr) -> Iterator[str]:
    for node in ast.walk(value):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_code_that_a_client_can_get_has_one_paragraph() -> None:
    named = paragraphs()
    assert len(named) > 100
    assert sorted(named) == sorted(set(named))
    assert codes() - NEVER_SENT - set(named) == set()


def test_every_paragraph_is_about_a_code_that_there_is() -> None:
    assert set(paragraphs()) <= codes() - NEVER_SENT


@pytest.mark.parametrize("path", docs.pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_a_document_names_exists(path: Path) -> None:
    pattern = (
        r"`((?:server|registry|engine|lora|kernels|tests|bench|migrations|deploy|demo)/[\w./-]+)`"
    )
    missing = [name for name in re.findall(pattern, path.read_text()) if not is_there(name)]
    assert missing == []


def is_there(name: str) -> bool:
    return (ROOT / name).exists() or any(ROOT.glob(name))


# ---- the checks of `make check` ----


def faults(language: str, text: str) -> list[str]:
    path = ROOT / "docs" / "page.md"
    return list(docs.faults_of(docs.Block(path, 3, language, text, runs=False)))


@pytest.mark.parametrize(
    ("language", "text", "told"),
    [
        ("json", "{", "docs/page.md:3: this is not JSON"),
        ("toml", "x = ", "docs/page.md:3: this is not TOML"),
        ("toml", "wings = 2", "docs/page.md:3: there is no setting wings"),
        ("python", "def", "docs/page.md:3: this is not Python"),
        ("sh", "chorale adapters push DIR", "`chorale adapters push DIR`: Missing option '--name'"),
        ("sh", "x=$(chorale keys create a b)", "`chorale keys create a b`: Got unexpected extra"),
        ("sh", "chorale prices add x=1 \\\n  --until soon", "'soon' is no time"),
    ],
)
def test_a_block_that_is_wrong_is_named(language: str, text: str, told: str) -> None:
    [fault] = faults(language, text)
    assert told in fault


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("chorale adapters fly x", "there is no command `chorale adapters fly x`"),
        ("chorale serve --wings 2", "has a flag that does not exist: --wings"),
        ("chorale keys \\\n  create --wings 2", "has a flag that does not exist: --wings"),
        ("| table | run `chorale serve --wings` |", "has a flag that does not exist: --wings"),
    ],
)
def test_a_command_that_does_not_exist_is_named_wherever_it_stands(text: str, told: str) -> None:
    [fault] = docs.check_commands(text)
    assert told in fault


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Ask `POST /v1/embeddings`.", "POST /v1/embeddings"),
        ("`DELETE /v1/usage` does", "DELETE /v1/usage"),
        ("`GET /v1/adapters/x/wings?y=z`", "GET /v1/adapters/x/wings"),
    ],
)
def test_an_endpoint_that_does_not_exist_is_named(text: str, told: str) -> None:
    assert list(docs.check_endpoints(text)) == [f"there is no endpoint {told}"]


def test_an_endpoint_may_be_named_with_values_and_a_query() -> None:
    text = "`GET /v1/adapters/{name}/versions`, `GET /v1/adapters/x`: GET /v1/usage?start=1. GET it"
    assert list(docs.check_endpoints(text)) == []


def test_what_is_right_has_no_fault() -> None:
    text = "chorale serve --model m --port 80  # comment\nls --wings\nHow chorale sings --wings"
    assert list(docs.check_commands(text)) == []
    assert faults("toml", "max_waiting = 3") == faults("text", "{") == []
