"""The files that pages load."""

import re
from importlib.resources import files

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
    text = visitor.get(f"/console/static/{name}").text
    for imported in re.findall(r'\bfrom "(.*?)"', text):
        assert re.fullmatch(r"\./[a-z_]+\.js\?[0-9a-f]{12}", imported)
        assert visitor.get(f"/console/static/{imported[2:]}").status_code == 200
        if imported.startswith("./actions.js"):
            assert f'"/console/static/{imported[2:]}"' in page
    assert text.count("import ") == text.count(' from "')
