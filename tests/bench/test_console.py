"""The benchmark of the console's pages, with a small installation: it asks for every page."""

from pathlib import Path

from bench.console import OPERATOR_PAGES, TENANT_PAGES, Console


def test_every_page_of_the_largest_and_the_smallest_tenant_is_measured(tmp_path: Path) -> None:
    setup = Console(database="sqlite", receipts=60, adapters=6, tenants=3)
    result = setup.measure(tmp_path)
    assert set(result["largest"]) == set(result["smallest"]) == set(TENANT_PAGES)
    assert set(result["operator"]) == set(OPERATOR_PAGES)
    assert result["rollups"] > 0
    pages = [it for who in ("largest", "smallest", "operator") for it in result[who].values()]
    assert all(0 <= page["queries_ms"] <= page["whole_ms"] for page in pages)
