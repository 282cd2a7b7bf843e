"""Pages of a tenant's adapters over HTTP: a tenant with very many beside one with a single page.

A page is bounded by rendering and sending it: both tenants' pages are as long. A search is bounded
by reading every name of the tenant until the page is full.
"""

import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import sqlalchemy as sa

from bench.databases import DATABASES
from bench.experiment import Experiment
from bench.in_process import EngineFactory
from bench.registry.push import push
from bench.registry.server import make_adapter, serve
from bench.report import percentiles_ms, ratio
from registry.tables import adapter_aliases, adapter_versions, adapters, alias_moves
from server.accounts.tables import tenants
from server.client.http import Client

_RANK = 4
_ARENA_BYTES = 256 << 20
_ROWS_AT_ONCE = 5000
_MANY, _FEW = "many", "few"
_WARM_UP = 20


@dataclass(frozen=True, kw_only=True)
class Listing(Experiment):
    """The time to list a tenant's adapters over HTTP.

    many, few: adapters of the two tenants; `few` fill one page.   requests: requests of each
    kind, one after the other, at random places.
    """

    stack: str = "tiny"
    many: int = 100_000
    few: int = 100
    requests: int = 500
    databases: tuple[str, ...] = ("sqlite", "postgresql")

    def measure(self, factory: EngineFactory) -> dict[str, Any]:
        return {name: self._measure(factory, name) for name in self.databases}

    def _measure(self, factory: EngineFactory, database: str) -> dict[str, Any]:
        with (
            DATABASES[database](factory.folder / database) as url,
            serve(factory, "server", database_url=url, arena_bytes=_ARENA_BYTES) as product,
        ):
            keys = {name: product.create_tenant(name) for name in (_MANY, _FEW)}
            for name in keys:
                push(product, keys[name], _name(0), make_adapter(factory, _RANK, seed=0))
            _multiply(url, {_MANY: self.many, _FEW: self.few})
            times = {
                tenant: {
                    kind: self._ask(product.url, keys[tenant], queries)
                    for kind, queries in self._queries(count).items()
                }
                for tenant, count in ((_MANY, self.many), (_FEW, self.few))
            }
        shutil.rmtree(factory.folder / "server")
        return {
            kind: {
                **{tenant: percentiles_ms(times[tenant][kind]) for tenant in times},
                "p50_many_to_few": ratio(*(median(times[tenant][kind]) for tenant in times)),
            }
            for kind in times[_MANY]
        }

    def _queries(self, count: int) -> dict[str, list[dict[str, Any]]]:
        """Return queries by kind. page: a whole page, after a random name.   search_common: a page
        of a search that all names match.   search_rare: a search that one name matches, so that all
        names are read.
        """
        stream = random.Random(0)
        numbers = [stream.randrange(max(count - self.few, 1)) for _ in range(self.requests)]
        return {
            "page": [{"after": _name(number)} for number in numbers],
            "search_common": [{"after": _name(n), "search": "customer"} for n in numbers],
            "search_rare": [{"search": f"{number:06}"} for number in numbers],
        }

    def _ask(self, url: str, key: str, queries: Sequence[dict[str, Any]]) -> list[float]:
        """Return the seconds that each query took, parsing its JSON included."""
        times = []
        with Client(url, key) as client:
            for query in [*queries[:_WARM_UP], *queries]:
                started = time.perf_counter()
                client.request("GET", "/v1/adapters", params={"limit": self.few, **query})
                times.append(time.perf_counter() - started)
        return times[-len(queries) :]


def _name(number: int) -> str:
    return f"customer-{number:06}-tone"


def _multiply(url: str, counts: dict[str, int]) -> None:
    """Copy each tenant's only adapter, row for row, until the tenant has `counts` adapters."""
    engine = sa.create_engine(url)
    with engine.begin() as conn:
        for tenant, count in counts.items():
            query = sa.select(tenants.c.tenant_id).where(tenants.c.name == tenant)
            tenant_id = conn.execute(query).scalar_one()
            for table in (adapters, adapter_versions, adapter_aliases, alias_moves):
                rows = conn.execute(sa.select(table).where(table.c.tenant_id == tenant_id)).all()
                for first in range(1, count, _ROWS_AT_ONCE):
                    numbers = range(first, min(first + _ROWS_AT_ONCE, count))
                    copies = [_copy(row, number) for number in numbers for row in rows]
                    conn.execute(sa.insert(table), copies)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        # Databases do this themselves, some time after so many rows were added.
        conn.execute(sa.text("ANALYZE"))
    engine.dispose()


def _copy(row: sa.Row[Any], number: int) -> dict[str, Any]:
    values = dict(row._mapping)
    values.pop("move_id", None)
    values["adapter_id"] = f"{values['adapter_id'][:-8]}{number:08}"
    if "name" in values:
        values["name"] = _name(number)
    return values
