"""A hook of mkdocs: what is in the site and not in docs/.

That is the documents at the root, and the page of all endpoints.
"""

import re
from pathlib import Path

from endpoints import endpoints_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from reference import make_app

ROOT = Path(__file__).parents[1]
PAGES = {
    "ARCHITECTURE.md": "developer/architecture.md",
    "CONTRIBUTING.md": "developer/contributing.md",
    "CHANGELOG.md": "developer/changelog.md",
}
"""The page in the site of each document."""

_LINK = re.compile(r"\]\((?!https?:|#)([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for document, page in PAGES.items():
        text = (ROOT / document).read_text()
        files.append(File.generated(config, page, content=_LINK.sub(_from_developer, text)))
    endpoints = endpoints_page(make_app().openapi())
    files.append(File.generated(config, "reference/endpoints.md", content=endpoints))
    return files


def _from_developer(link: re.Match[str]) -> str:
    """A link as a page under docs/developer has it."""
    path, hash_sign, anchor = link[1].partition("#")
    if path in PAGES:
        path = PAGES[path].removeprefix("developer/")
    elif path.startswith("docs/"):
        path = f"../{path.removeprefix('docs/')}"
    return f"]({path}{hash_sign}{anchor})"
