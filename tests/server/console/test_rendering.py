"""The files that pages load."""

import re
from importlib.resources import files
from urllib.parse import urljoin

import pytest

from tests.server.console.browsing import Visitor
from tests.server.in_process import InProcess

SCRIPTS = [
    path.name
    for path in (files("server.console") / "static").iterdir()
    if path.name.endswith(".js") and ".min." not in path.name
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_imported_by_the_url_that_pages_have_for_it(
    product: InProcess, name: str
) -> None:
    """A browser would run it twice otherwise, and each form of a page would be sent twice."""
    visitor = Visitor(product)
    page = visitor.get("/console/sign-in").text
    actions = re.search(r'"(/console/static/[^"]+/actions\.js)"', page)
    assert actions is not None
    script = urljoin(actions[1], name)
    text = visitor.get(script).text
    for imported in re.findall(r'\bfrom "(.*?)"', text):
        assert visitor.get(urljoin(script, imported)).status_code == 200
        if imported.endswith("actions.js"):
            assert urljoin(script, imported) == actions[1]
    imports = re.findall(r"^import\b", text, re.M)
    assert len(imports) == len(re.findall(r'^(?:import\b|\}).* from "', text, re.M))
