"""deploy/compose.yaml without containers: its two machines as processes, by its own commands.

Every setting is the file's own. Only the surroundings of a container are replaced: folders stand
for mounts, ports are free ones, and addresses stand for the names of PostgreSQL, Redis and the
object store.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa

from server.billing.tables import holds
from tests import needs
from tests.deployment_files import DEPLOY, Compose, filled_variables, image_environment
from tests.e2e.day import Customers, paid, wrong
from tests.e2e.services import Services, running_services
from tests.e2e.stack import Stack, Tenant
from tests.ports import free_port

# Settings for tests only: arenas are small, and clients, gateways and engines share two cores, so
# Redis gets a longer deadline: the other processes may be late.
TEST_SETTINGS = {
    "CHORALE_ARENA_BYTES": str(64 << 20),
    "CHORALE_MAX_MODEL_LEN": "512",
    "CHORALE_REDIS_DEADLINE_S": "2.0",
    "OMP_NUM_THREADS": "1",
}


class Machine(Stack):
    """One of the file's machines. addresses: replacements for parts of the file's values."""

    def __init__(
        self,
        name: str,
        service: Mapping[str, Any],
        folder: Path,
        model: Path,
        addresses: Mapping[str, str],
    ) -> None:
        self.name = name
        self.data_dir = folder / name
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        environment = image_environment() | service["environment"]
        self.admin_key = environment["CHORALE_ADMIN_KEY"]
        self.model = environment["CHORALE_MODEL_NAME"]
        self.tenants = []
        self._clients = {}
        self._process = None
        self._command = service["command"]
        mounts = {
            "CHORALE_MODEL": str(model),
            "CHORALE_DATA_DIR": str(self.data_dir),
            "CHORALE_PORT": str(self.port),
        }
        replaced = {k: _replace(v, addresses) for k, v in environment.items() if k != "PATH"}
        self._environment = replaced | mounts | TEST_SETTINGS

    def start(self, *, wait: bool = True, **_: str) -> "Machine":
        command = [sys.executable, "-m", "server.cli.main", *self._command]
        self._process = subprocess.Popen(command, env=os.environ | self._environment)
        if wait:
            self.wait_ready()
        return self

    def terminate(self) -> None:
        """Ask the machine to end, as `docker stop` does."""
        assert self._process
        self._process.terminate()

    def wait_gone(self) -> int:
        """Wait for the machine's end and return its exit status. The file's own limit is longer."""
        assert self._process
        return self._process.wait(60)

    @property
    def operator(self) -> httpx.Client:
        return self.client(self.admin_key)


def machines(folder: Path, model: Path, addresses: Mapping[str, str]) -> list[Machine]:
    """Return the machines of compose.yaml, in its order; they are not started."""
    compose = Compose.read(filled_variables())
    return [Machine(name, s, folder, model, addresses) for name, s in compose.machines.items()]


@dataclass
class Fleet:
    """The running deployment: services, the machines of compose.yaml, and a tenant."""

    services: Services
    machines: list[Machine]
    tenant: Tenant
    database: sa.Engine

    def check_books(self, *groups: Customers) -> None:
        """Check that customers of one tenant are billed for what they saw, once all is settled."""
        tenant_id = groups[0].tenant.tenant_id
        is_open = (holds.c.tenant_id == tenant_id) & (holds.c.state == "open")
        count = sa.select(sa.func.count()).where(is_open)

        def are_settled() -> bool:
            with self.database.connect() as conn:
                return conn.scalar(count) == 0

        Stack.wait(are_settled, 300)
        seen = [one for customers in groups for one in customers.seen]
        faults = [fault for customers in groups for fault in customers.faults]
        found = wrong(seen, paid(self.database, tenant_id)) + faults
        assert not found, "\n".join(found)


@contextmanager
def running_fleet(
    folder: Path, model: Path, make_postgres: Callable[[str], str]
) -> Iterator[Fleet]:
    with running_services(folder, make_postgres) as services:
        both = machines(folder / "machines", model, services.addresses)
        # No connection is kept, since an outage ends all of them.
        database = sa.create_engine(services.database_url, poolclass=sa.NullPool)
        try:
            for machine in both:
                machine.start(wait=False)
            for machine in both:
                machine.wait_ready()
            yield Fleet(services, both, both[0].tenant("acme"), database)
        finally:
            for machine in both:
                machine.stop()
            database.dispose()


@contextmanager
def balanced(
    machines: Sequence[Any], folder: Path, operators: str = "always_false"
) -> Iterator[str]:
    """Run a balancer with haproxy.cfg and the machines' addresses in it; yield its address.

    Its messages are in `folder`/haproxy.log.   operators: how it knows clients that are operators.
    """
    haproxy = needs.program("haproxy", "haproxy")
    port = free_port()
    text = (DEPLOY / "haproxy.cfg").read_text().replace("bind :8080", f"bind 127.0.0.1:{port}")
    text = text.replace("acl is_operator always_false", f"acl is_operator {operators}")
    for machine in machines:
        text = text.replace(f"{machine.name}:8000", f"127.0.0.1:{machine.port}")
    (folder / "haproxy.cfg").write_text(text)
    with (folder / "haproxy.log").open("w") as log:
        command = (haproxy, "-f", str(folder / "haproxy.cfg"))
        balancer = subprocess.Popen(command, stdout=log)
    try:
        Stack.wait(lambda: _listens(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        balancer.terminate()
        balancer.wait(30)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _replace(value: str, addresses: Mapping[str, str]) -> str:
    for name, address in addresses.items():
        value = value.replace(name, address)
    return value
