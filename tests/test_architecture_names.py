"""ARCHITECTURE.md and docs/developer name files that exist; a walk names each file once."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"`((?:server|registry|engine|lora|kernels|tests|bench|migrations)/[\w/]+\.py)`")
PAGES = [ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs" / "developer").glob("*.md"))]
TEXT = PAGES[0].read_text()


def walk(title: str) -> list[str]:
    """Return the files of a section's numbered list, in order."""
    section = TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]
    steps = re.search(r"^1\. .*?(?=\n\n|\Z)", section, re.MULTILINE | re.DOTALL)
    assert steps, title
    return NAMED.findall(steps[0])


def test_every_file_that_is_named_exists() -> None:
    named = [path for page in PAGES for path in NAMED.findall(page.read_text())]
    assert len(named) > 100
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("title", ["The life of a request", "How an adapter comes in"])
def test_a_walk_names_each_file_once(title: str) -> None:
    files = walk(title)
    assert len(files) > 20
    assert [path for path, times in Counter(files).items() if times > 1] == []
