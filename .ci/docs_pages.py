"""A hook of mkdocs: what is in the site and not in docs/.

That is the documents at the root, the pictures of bench/results, and the page of all endpoints.
"""

import re
from pathlib import Path

from endpoints import endpoints_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from reference import make_app

ROOT = Path(__file__).parents[1]
PAGES = {
    "ARCHITECTURE.md": "developer/architecture.md",
    "CONTRIBUTING.md": "developer/contributing.md",
    "CHANGELOG.md": "developer/changelog.md",
}
"""The page in the site of each document."""

_PICTURES = "pictures"
_LINK = re.compile(r"\]\((?!https?:|#)([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for document, page in PAGES.items():
        text = (ROOT / document).read_text()
        files.append(File.generated(config, page, content=_LINK.sub(_from_developer, text)))
    endpoints = endpoints_page(make_app().openapi())
    files.append(File.generated(config, "reference/endpoints.md", content=endpoints))
    for picture in (ROOT / "bench" / "results").glob("*.svg"):
        uri = f"{_PICTURES}/{picture.name}"
        files.append(File.generated(config, uri, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return markdown.replace("](../../bench/results/", f"](../{_PICTURES}/")


def _from_developer(link: re.Match[str]) -> str:
    """A link as a page under docs/developer has it."""
    path, hash_sign, anchor = link[1].partition("#")
    if path in PAGES:
        path = PAGES[path].removeprefix("developer/")
    elif path.startswith("docs/"):
        path = f"../{path.removeprefix('docs/')}"
    return f"]({path}{hash_sign}{anchor})"
