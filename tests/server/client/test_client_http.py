import json

import httpx
import pytest

from server.client.http import ApiRefused, Client
from server.client.paths import adapter_path
from tests.server.fake_uploads import refusal


def make_client(handler):
    return Client("http://chorale.test", "key", transport=httpx.MockTransport(handler))


def test_a_list_is_read_to_its_last_page():
    def serve(request):
        after = int(request.url.params.get("after", 0))
        data = [{"id": after + 1}, {"id": after + 2}]
        return httpx.Response(200, json={"data": data, "has_more": after < 4})

    with make_client(serve) as client:
        found = client.list_all("/v1/adapters", "after", "id")
    assert [item["id"] for item in found] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("content", [b"<html>Bad gateway</html>", b"[]", b'{"error": "x"}', b""])
def test_an_error_of_another_shape_is_still_one_sentence(content):
    with (
        make_client(lambda _: httpx.Response(502, content=content)) as client,
        pytest.raises(ApiRefused, match=r"^The server answered 502\.$"),
    ):
        client.request("GET", "/v1/models")


def stream_of(*events):
    content = "".join(f"data: {event}\n\n" for event in events)
    return lambda _: httpx.Response(200, text=content)


def test_a_stream_ends_where_it_says_so():
    events = ('{"n": 1}', '{"n": 2}', "[DONE]", '{"n": 3}')
    with make_client(stream_of(*events)) as client:
        assert list(client.stream("/v1/chat/completions", {})) == [{"n": 1}, {"n": 2}]


def test_an_error_in_mid_stream_is_raised_after_what_came_before():
    error = json.dumps({"error": {"message": "The engine died.", "code": "engine_dead"}})
    with make_client(stream_of('{"n": 1}', error)) as client:
        chunks = client.stream("/v1/chat/completions", {})
        assert next(chunks) == {"n": 1}
        with pytest.raises(ApiRefused, match=r"The engine died\."):
            next(chunks)


def test_a_refused_stream_says_why():
    with (
        make_client(lambda _: refusal(404, "model_not_found", "No such model.")) as client,
        pytest.raises(ApiRefused, match=r"No such model\."),
    ):
        list(client.stream("/v1/chat/completions", {}))


def test_what_is_typed_for_a_name_stays_one_piece_of_the_path():
    assert adapter_path("a/../b?c", "versions", 3) == "/v1/adapters/a%2F..%2Fb%3Fc/versions/3"


@pytest.mark.parametrize(
    ("status", "headers", "is_passing"),
    [
        (503, {}, True),
        (429, {"retry-after": "7"}, True),
        (408, {}, True),
        (429, {"x-should-retry": "false"}, False),
        (502, {"x-should-retry": "false"}, False),
        (404, {}, False),
    ],
)
def test_what_the_server_calls_final_is_not_tried_again(status, headers, is_passing):
    with (
        make_client(lambda _: refusal(status, **headers)) as client,
        pytest.raises(ApiRefused) as raised,
    ):
        client.request("GET", "/v1/models")
    assert raised.value.is_passing == is_passing
