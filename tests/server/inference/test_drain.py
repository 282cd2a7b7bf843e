"""A gateway that is about to end takes no requests, and says so."""

from tests.server.in_process import InProcess


def test_while_draining_nobody_is_admitted_and_told_to_try_elsewhere(product: InProcess) -> None:
    user = product.user("acme")
    product.gateway.drain.begin()
    refused = user.complete("base")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert product.engines.asked == []
