"""The services that compose.yaml names, as processes here; each can be away for a while."""

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import boto3
import redis
import sqlalchemy as sa
from moto.server import ThreadedMotoServer

from tests import needs
from tests.deployment_files import Compose, filled_variables
from tests.e2e.stack import Stack
from tests.ports import free_port


@dataclass
class Services:
    """The running services. addresses: replacements for parts of compose.yaml's values."""

    addresses: dict[str, str]
    database_url: str
    redis: subprocess.Popen[bytes]
    store: ThreadedMotoServer

    @contextmanager
    def database_away(self) -> Iterator[None]:
        """End all connections to the machines' database, and have PostgreSQL refuse new ones."""
        url = sa.make_url(self.database_url)
        other = sa.create_engine(url.set(database="postgres"), isolation_level="AUTOCOMMIT")
        end_all = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"
        with other.connect() as conn:
            conn.execute(sa.text(f'ALTER DATABASE "{url.database}" ALLOW_CONNECTIONS false'))
            try:
                conn.execute(sa.text(end_all), {"name": url.database})
                yield
            finally:
                conn.execute(sa.text(f'ALTER DATABASE "{url.database}" ALLOW_CONNECTIONS true'))
        other.dispose()

    @contextmanager
    def redis_frozen(self) -> Iterator[None]:
        self.redis.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.redis.send_signal(signal.SIGCONT)

    @contextmanager
    def store_away(self) -> Iterator[None]:
        """Stop the object store's server; what it stores stays in this process."""
        host, port = self.store.get_host_and_port()
        self.store.stop()
        try:
            yield
        finally:
            self.store = ThreadedMotoServer(host, port=port, verbose=False)
            self.store.start()


@contextmanager
def running_services(folder: Path, make_postgres: Callable[[str], str]) -> Iterator[Services]:
    """Start the services as the file says."""
    needs.redis()
    compose = Compose.read(filled_variables())
    environment = compose.machines["chorale-1"]["environment"]
    store = ThreadedMotoServer(port=0, verbose=False)
    store.start()
    _, port = store.get_host_and_port()
    client = boto3.client(
        "s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1",
        aws_access_key_id="any", aws_secret_access_key="any",
    )  # fmt: skip
    client.create_bucket(Bucket="adapters")
    server, redis_port = _start_redis(compose.services["redis"]["command"], folder)
    url = make_postgres("template1")
    addresses = {
        environment["CHORALE_DATABASE_URL"]: url,
        "redis:6379": f"127.0.0.1:{redis_port}",
        "s3:8333": f"127.0.0.1:{port}",
    }
    services = Services(addresses, url, server, store)
    yield services
    server.kill()
    server.wait()
    services.store.stop()


def _start_redis(command: list[str], folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start a Redis with the file's own options; return it and its port."""
    port = free_port()
    here = ["--port", str(port), "--bind", "127.0.0.1", "--loglevel", "warning"]
    server = subprocess.Popen([needs.redis(), *command[1:], *here], cwd=folder)
    with redis.Redis(port=port) as client:
        Stack.wait(lambda: _answers(client))
    return server, port


def _answers(client: redis.Redis) -> bool:
    # A server with a password answers by asking for it.
    with suppress(redis.ConnectionError):
        try:
            return bool(client.ping())
        except redis.AuthenticationError:
            return True
    return False
