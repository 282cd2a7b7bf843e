"""The figures of all tenants at `GET /metrics`, and who may read them."""

import asyncio
from dataclasses import replace

import httpx
import pytest

from tests.server.in_process import ADMIN_KEY, InProcess

NEAR, FAR = "127.0.0.1", "203.0.113.9"


def scrape(
    product: InProcess, host: str, networks: tuple[str, ...] | None = None, **headers: str
) -> httpx.Response:
    """Ask for the metrics from an address.   networks: the setting; None for its default."""
    if networks is not None:
        settings = product.gateway.settings.model_copy(update={"metrics_networks": networks})
        product.gateway = replace(product.gateway, settings=settings)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(product.app, client=(host, 7))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.get("/metrics", headers=headers)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("host", "networks", "status"),
    [
        (NEAR, None, 200),
        ("::1", None, 200),
        ("::ffff:127.0.0.1", None, 200),
        (FAR, None, 403),
        (FAR, ("203.0.113.0/24",), 200),
        ("2001:db8::7", ("203.0.113.0/24", "2001:db8::/32"), 200),
        (NEAR, ("203.0.113.0/24",), 403),
        (NEAR, (), 403),
    ],
)
def test_figures_of_tenants_are_for_the_networks_that_the_setting_names(
    product: InProcess, host: str, networks: tuple[str, ...] | None, status: int
) -> None:
    answer = scrape(product, host, networks)
    assert answer.status_code == status
    if status == 403:
        assert "metrics_networks" in answer.json()["error"]["message"]
        assert "chorale_" not in answer.text


@pytest.mark.parametrize(
    ("forwarded", "status"),
    [(NEAR, 200), (f"{NEAR}, {FAR}", 403), (f"{FAR}, {NEAR}", 403), ("no address", 403)],
)
def test_whom_a_proxy_names_is_from_such_a_network_too(
    product: InProcess, forwarded: str, status: int
) -> None:
    headers = {"x-forwarded-for": forwarded}
    assert scrape(product, NEAR, **headers).status_code == status
    assert scrape(product, FAR, **headers).status_code == 403


def test_the_operator_reads_them_from_anywhere_and_a_tenant_does_not(product: InProcess) -> None:
    assert scrape(product, FAR, authorization=f"Bearer {ADMIN_KEY}").status_code == 200
    key = product.user("acme").api_key
    assert scrape(product, FAR, authorization=f"Bearer {key}").status_code == 403
