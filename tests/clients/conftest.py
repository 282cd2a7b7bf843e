"""Fixtures shared by the clients: one demo server, their environments, and the table of results."""

from collections.abc import Iterator

import pytest

from tests.clients.clients import INSTALLED, ROOT, Clients
from tests.clients.table import Table
from tests.e2e.stack import Stack, running

DEMO = ROOT / "demo"
MAX_NUM_BATCHED_TOKENS = 64


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-table", action="store_true", help="write docs/tenant/clients.md anew")


@pytest.fixture(scope="session")
def clients(request: pytest.FixtureRequest) -> Iterator[Clients]:
    """Start to make the environments that the chosen tests need."""
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = [spec.params.get("name") for spec in specs if spec]
    clients = Clients([name for name in INSTALLED if name in chosen])
    yield clients
    clients.close()


@pytest.fixture(scope="session")
def server(clients: Clients, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Serve the demo's model and adapters, with small steps, so that prompts come in chunks."""
    settings = {"model_name": "chorale-demo", "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}
    with running(tmp_path_factory.mktemp("server"), DEMO / "model", **settings) as stack:
        tenant = stack.tenant("acme")
        for name in ("json", "shout", "agent"):
            tenant.push(name, DEMO / "adapters" / name)
        yield stack


@pytest.fixture(scope="session")
def table() -> Table:
    return Table()
