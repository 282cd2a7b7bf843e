"""The page of the playground before its script runs; tests/e2e/demo/ runs it in a browser."""

import re

from server.api.openai import ChatRequest
from tests.server.console.browsing import SignIn
from tests.server.in_process import User


def test_every_parameter_is_a_field_of_the_api(acme: User, signed_in: SignIn) -> None:
    page = signed_in(acme).get("/console/playground")
    assert page.status_code == 200
    parameters = re.findall(r'name="(\w+)"[^>]* data-parameter', page.text)
    assert {"temperature", "seed", "stop", "tools", "logprobs", "top_k"} <= set(parameters)
    assert set(parameters) <= set(ChatRequest.model_fields)


def test_what_may_be_kept_in_the_address_is_no_text(acme: User, signed_in: SignIn) -> None:
    fields = re.findall(
        r"<(?:input|select|textarea)[^>]*>", signed_in(acme).get("/console/playground").text
    )
    kept = [field for field in fields if "data-kept" in field]
    assert len(kept) > 5
    assert all(
        re.search(r'type="(number|checkbox)"', it) or it.startswith("<select") for it in kept
    )
