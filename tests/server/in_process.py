"""A gateway called without a socket, whose engine answers every request with three tokens."""

import asyncio
import contextlib
import functools
import itertools
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import httpx
import pytest
from fastapi import FastAPI

from server.accounts.admin_key import AdminKey
from server.accounts.auth import INFERENCE
from server.accounts.keys import create_key
from server.api.app import create_app
from server.api.gateway import Gateway
from server.api.middleware import WriteLine
from server.assembly import assemble
from server.billing.base_revisions import name_base
from server.billing.prices import ensure_price
from server.console.mounting import mount
from server.database.database import DEFAULT_FILE
from server.inference import base_maker
from server.inference.bases import Bases
from server.launch.settings import Settings
from server.limits.memory import MemoryLimiter
from server.pool.control_files import BaseEntry
from tests.server.bases import change_base, demo_entries
from tests.server.factories import NOW_MS, make_tenant
from tests.server.fake_engines import FakeEngines

DEMO = Path(__file__).parents[2] / "demo" / "model"
ADMIN_KEY = "the-operator"
_first: list[FastAPI] = []
_tokenizer = functools.cache(base_maker.Tokenizer)
_numbers = itertools.count()


def make_app(gateway: Gateway, write_line: WriteLine = lambda _: None) -> FastAPI:
    """The application with its console. All applications share the first one's routes and their
    document, which know no gateway: to make them anew would take a fifth of a second and a second.
    """
    app = mount(create_app(gateway, write_line))
    if not _first:
        _first.append(app)
    app.router.routes[:] = _first[0].router.routes
    app.openapi = _first[0].openapi  # type: ignore[method-assign]
    return app


def assemble_fast(settings: Settings, entries: Sequence[BaseEntry], admin_key: AdminKey) -> Gateway:
    """Assemble a gateway; all gateways of a folder with a model share its tokenizer."""
    with patch.object(base_maker, "Tokenizer", _tokenizer):
        return assemble(settings, entries, admin_key)


def with_engines(gateway: Gateway, engines: Any, **changes: Any) -> Gateway:
    """A copy of the gateway whose base model has other engines.   changes: other fields of it."""
    bases = Bases(gateway.bases.entries, tuple(gateway.bases))
    copied = replace(gateway, bases=bases, **changes)
    change_base(copied, engines=engines)
    return copied


@dataclass
class InProcess:
    """The gateway's application and its users."""

    gateway: Gateway
    engines: FakeEngines
    _app: FastAPI | None = None

    @classmethod
    def build(
        cls, data_dir: Path, database_url: str, model_name: str = "base", **options: Any
    ) -> Self:
        """Build a gateway and its application.

        database_url: of a migrated database.   options: further settings.
        """
        named = {"model": str(DEMO), "model_name": model_name, "database_url": database_url}
        settings = Settings(data_dir=data_dir, **named, **options)
        engines = FakeEngines()
        built = assemble_fast(settings, demo_entries(settings), AdminKey(ADMIN_KEY))
        asyncio.run(built.bases.default.engines.close())
        built.database.write_sync(lambda conn: ensure_price(conn, NOW_MS))
        base = built.bases.default.model
        built.database.write_sync(lambda c: name_base(c, base.base_revision, base.model_id))
        change_base(built, engines=engines)
        return cls(built, engines)

    @classmethod
    @contextlib.contextmanager
    def running(
        cls, migrated: Path, folder: Path, model_name: str = "base", **options: Any
    ) -> "Iterator[Self]":
        """Build a gateway on a copy of a migrated SQLite database, and close it at the end."""
        shutil.copy(migrated, folder / DEFAULT_FILE)
        product = cls.build(folder, f"sqlite:///{folder / DEFAULT_FILE}", model_name, **options)
        yield product
        product.close()

    @property
    def app(self) -> FastAPI:
        if self._app is None or self._app.state.gateway is not self.gateway:
            self._app = make_app(self.gateway)
        return self._app

    def use(self, engines: Any) -> None:
        """Switch to other engines and keep the application."""
        self.engines, self.gateway = engines, with_engines(self.gateway, engines)
        if self._app is not None:
            self._app.state.gateway = self.gateway

    def close(self) -> None:
        self.gateway.database.close()

    def user(self, name: str = "", **options: Any) -> "User":
        """Make a tenant with a key.   name: "" for one that nobody has.   options: of the key."""
        name = name or f"tenant-{next(_numbers)}"
        tenant, pepper = make_tenant(self.gateway.database, name), self.gateway.pepper
        api_key = self.gateway.database.write_sync(
            lambda c: create_key(c, tenant.tenant_id, "a key", pepper, now_ms=NOW_MS, **options)
        )[1]
        return User(self, tenant.tenant_id, name, api_key)

    @property
    def operator(self) -> "User":
        return User(self, "", "operator", ADMIN_KEY)


@dataclass
class User:
    """A tenant with a key, or the operator."""

    product: InProcess
    tenant_id: str
    name: str
    api_key: str

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        content: bytes | None = None,
    ) -> httpx.Response:
        """Send a request. body: sent as JSON.   content: sent as it is."""

        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self.product.app)
            sent = {"authorization": f"Bearer {self.api_key}"} | (headers or {})
            async with httpx.AsyncClient(
                transport=transport, base_url="http://gateway", headers=sent
            ) as client:
                return await client.request(method, path, json=body, content=content)

        return asyncio.run(call())

    def with_new_key(self, **terms: Any) -> "User":
        """The user with another key, which may ask for completions if `terms` do not say else."""
        asked = {"name": "few", "scopes": [INFERENCE]} | terms
        made = self.call("POST", "/v1/keys", asked).json()
        return replace(self, api_key=made["api_key"])

    def complete(self, model: str, **changes: Any) -> httpx.Response:
        body = {"model": model, "prompt": "Hello there", "max_tokens": 9, **changes}
        return self.call("POST", "/v1/completions", body)


@pytest.fixture(scope="module")
def product_of_file(shared_product: InProcess) -> InProcess:
    """A `product` that all tests of a file share, each of which makes tenants of its own."""
    return shared_product


@pytest.fixture(scope="module")
def still_product(shared_product: InProcess) -> InProcess:
    """A `product_of_file` whose limiter's clock stands still: nothing refills while a test runs."""
    gateway = shared_product.gateway
    limiter = MemoryLimiter(lambda: NOW_MS, note_refusal=gateway.limit_refusals.note)
    shared_product.gateway = replace(gateway, limiter=limiter)
    return shared_product
