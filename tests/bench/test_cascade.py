"""The cascade's committed rows keep what the page for tenants says of them."""

import pytest

from bench.cascade import measure, running
from bench.page import FOLDER, PAGE, read_rows
from demo.domain import held_out


def test_the_committed_cascade_keeps_the_accuracy_within_1_percent_for_half_the_price() -> None:
    rows = [row for row in read_rows(FOLDER / "results") if row["bench"] == "cascade"]
    results = {row["setup"]["model"]: row["result"] for row in rows}
    assert list(results) == ["small", "large", "cheap", "equal"]
    for half in (results, {name: result["choosing"] for name, result in results.items()}):
        assert half["small"]["accuracy_below_large"] > 0.01 >= half["cheap"]["accuracy_below_large"]
    assert results["cheap"]["price_to_large"] <= 0.5
    assert results["equal"]["choosing"]["accuracy_below_large"] <= 0
    cheap, small = results["cheap"], results["small"]
    words = (
        f"right in {cheap['accuracy']:.0%} for {cheap['price_to_large']:.0%} of",
        f"with {cheap['went_on']:.0%} of the requests",
        f"right in {small['accuracy']:.1%} for {small['price_to_large']:.0%}",
    )
    said = (PAGE.parents[1] / "tenant" / "routes.md").read_text().replace(" %", "%")
    assert [each for each in words if each not in said] == []


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_on_a_real_server_the_prices_are_those_of_the_tenants_bill() -> None:
    with running() as client:
        rows = measure(client, held_out()[::20])
        (line,) = client.get("/v1/usage").json()["data"]
    results = [half for _, result in rows for half in (result, result["choosing"])]
    assert line["num_requests"] == sum(each["attempts"] for each in results)
    assert line["amount_nanousd"] == round(sum(each["price_usd"] for each in results) * 1e9)
    by_name = {setup["model"]: result for setup, result in rows}
    assert by_name["equal"]["choosing"]["accuracy_below_large"] <= 0
