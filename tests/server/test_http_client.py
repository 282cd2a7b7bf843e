import hashlib
import json
import re

import httpx
import pytest

from server.http_client import (
    ADAPTER_FILES,
    ApiRefused,
    Client,
    NotAnAdapter,
    ServerUnreachable,
    UploadMemory,
)

CONFIG, WEIGHTS = ADAPTER_FILES
PART_BYTES = 10


class FakeUploads:
    """The server's side of the upload protocol.

    faults: called one by one with each PUT, before it counts; what one answers or raises replaces
    the server's answer.
    """

    def __init__(self):
        self.uploads = {}
        self.log = []
        self.faults = []

    def __call__(self, request):
        path, body = request.url.path, request.read()
        self.log.append((request.method, path))
        if match := re.fullmatch("/v1/adapters/(.+)/uploads", path):
            return self.create(match[1], json.loads(body))
        if match := re.fullmatch("/v1/uploads/([^/]+)", path):
            return self.show(match[1])
        if match := re.fullmatch("/v1/uploads/(.+)/files/(.+)", path):
            fault = self.faults.pop(0) if self.faults else None
            answer = fault(self, request) if fault else None
            return answer or self.put(*match.groups(), request.headers["content-range"], body)
        if match := re.fullmatch("/v1/uploads/(.+)/complete", path):
            return self.complete(match[1])
        raise AssertionError(path)

    def create(self, name, asked):
        upload_id = f"up_{len(self.uploads)}"
        files = {n: {**file, "received_bytes": 0} for n, file in asked["files"].items()}
        self.uploads[upload_id] = {
            "id": upload_id,
            "adapter": name,
            "alias": asked["alias"],
            "state": "open",
            "files": files,
            "content": dict.fromkeys(files, b""),
        }
        return self.show(upload_id)

    def show(self, upload_id):
        upload = self.uploads.get(upload_id)
        if upload is None:
            return refusal(404, "upload_not_found")
        return httpx.Response(200, json={k: v for k, v in upload.items() if k != "content"})

    def put(self, upload_id, filename, content_range, body):
        first, last, total = map(int, re.findall(r"\d+", content_range))
        upload = self.uploads[upload_id]
        content = upload["content"][filename]
        assert last - first + 1 == len(body) <= PART_BYTES
        assert total == upload["files"][filename]["size_bytes"]
        if first != len(content):
            return refusal(409, "upload_offset_mismatch")
        return self.append(upload_id, filename, body)

    def append(self, upload_id, filename, body):
        upload = self.uploads[upload_id]
        upload["content"][filename] += body
        upload["files"][filename]["received_bytes"] = len(upload["content"][filename])
        return httpx.Response(200, json=upload["files"][filename])

    def complete(self, upload_id):
        upload = self.uploads[upload_id]
        for name, content in upload["content"].items():
            assert hashlib.sha256(content).hexdigest() == upload["files"][name]["sha256"]
        upload["state"] = "complete"
        return httpx.Response(200, json={"adapter": upload["adapter"], "version": {"version": 1}})

    def num_calls(self, method, pattern):
        return sum(m == method and bool(re.search(pattern, path)) for m, path in self.log)


def refusal(status, code="some_code", message="No.", **headers):
    error = {"message": message, "type": "t", "param": "p", "code": code}
    return httpx.Response(status, json={"error": error}, headers=headers)


def break_off(server, request):
    raise httpx.ReadError("reset", request=request)


def break_off_after_it_counted(server, request):
    *_, upload_id, _, filename = request.url.path.split("/")
    server.put(upload_id, filename, request.headers["content-range"], request.read())
    raise httpx.ReadError("reset", request=request)


def someone_else_sent_four_bytes(server, request):
    *_, upload_id, _, filename = request.url.path.split("/")
    server.append(upload_id, filename, request.read()[:4])
    return None


def make_adapter(tmp_path, weights=b"w" * 37):
    folder = tmp_path / "adapter"
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_bytes(b"{}")
    (folder / WEIGHTS).write_bytes(weights)
    return folder


def make_client(handler, pauses=None):
    return Client(
        "http://chorale.test",
        "key",
        part_bytes=PART_BYTES,
        transport=httpx.MockTransport(handler),
        sleep=(pauses if pauses is not None else []).append,
    )


def test_files_arrive_in_parts_and_whole(tmp_path):
    server, seen = FakeUploads(), []
    with make_client(server) as client:
        answer = client.push(
            "mine", make_adapter(tmp_path), alias="prod", on_progress=lambda *p: seen.append(p)
        )
    assert answer == {"adapter": "mine", "version": {"version": 1}}
    assert server.uploads["up_0"]["alias"] == "prod"
    assert server.num_calls("PUT", WEIGHTS) == 4
    assert seen == sorted(seen)
    assert seen[-1] == (39, 39)


def test_after_an_offset_mismatch_it_goes_on_from_where_the_server_stands(tmp_path):
    server, pauses = FakeUploads(), []
    server.faults = [None, someone_else_sent_four_bytes]
    with make_client(server, pauses) as client:
        client.push("mine", make_adapter(tmp_path))
    assert server.uploads["up_0"]["state"] == "complete"
    assert pauses == []


@pytest.mark.parametrize("fault", [break_off, break_off_after_it_counted])
def test_a_broken_connection_sends_nothing_twice_and_leaves_nothing_out(tmp_path, fault):
    server = FakeUploads()
    server.faults = [None, None, fault, None, fault]
    with make_client(server) as client:
        client.push("mine", make_adapter(tmp_path))
    assert server.uploads["up_0"]["state"] == "complete"


def test_it_waits_as_long_as_the_server_asks_for(tmp_path):
    server, pauses = FakeUploads(), []
    server.faults = [lambda *_: refusal(503, **{"retry-after": "3"})]
    with make_client(server, pauses) as client:
        client.push("mine", make_adapter(tmp_path))
    assert pauses == [3.0]


def test_it_gives_up_after_a_bounded_number_of_failures(tmp_path):
    server, pauses = FakeUploads(), []
    server.faults = [break_off] * 100
    with make_client(server, pauses) as client, pytest.raises(ServerUnreachable, match="reset"):
        client.push("mine", make_adapter(tmp_path))
    assert server.num_calls("PUT", CONFIG) == 6
    assert pauses == [1.0, 2.0, 4.0, 8.0, 10.0]


def test_a_refused_part_is_not_sent_again(tmp_path):
    server = FakeUploads()
    server.faults = [lambda *_: refusal(413, "too_large", "Too large.")]
    with make_client(server) as client, pytest.raises(ApiRefused, match=r"Too large\.") as raised:
        client.push("mine", make_adapter(tmp_path))
    assert (raised.value.status, raised.value.code, raised.value.param) == (413, "too_large", "p")
    assert server.num_calls("PUT", "") == 1


def interrupted_push(server, folder, memory):
    server.faults = [None, None, *[break_off] * 6]
    with make_client(server) as client, pytest.raises(ServerUnreachable):
        client.push("mine", folder, memory=memory)
    server.faults = []


def test_a_later_push_goes_on_where_the_last_one_stopped(tmp_path):
    server, memory = FakeUploads(), UploadMemory(tmp_path / "memory" / "file")
    folder = make_adapter(tmp_path)
    interrupted_push(server, folder, memory)
    server.log.clear()
    with make_client(server) as client:
        client.push("mine", folder, memory=memory)
    assert len(server.uploads) == 1
    assert server.num_calls("PUT", CONFIG) == 0
    assert server.num_calls("PUT", WEIGHTS) == 3
    with make_client(server) as client:
        client.push("mine", folder, memory=memory)
    assert len(server.uploads) == 2


@pytest.mark.parametrize("what", ["bytes", "name", "alias", "gone", "expired"])
def test_an_upload_that_is_over_or_of_something_else_is_not_gone_on_with(tmp_path, what):
    server, memory = FakeUploads(), UploadMemory(tmp_path / "memory" / "file")
    folder = make_adapter(tmp_path)
    interrupted_push(server, folder, memory)
    name, alias = "mine", None
    match what:
        case "bytes":
            make_adapter(tmp_path, b"x" * 37)
        case "name":
            name = "other"
        case "alias":
            alias = "prod"
        case "gone":
            server.uploads = {"up_other": server.uploads["up_0"]}
        case "expired":
            server.uploads["up_0"]["state"] = "expired"
    with make_client(server) as client:
        client.push(name, folder, alias=alias, memory=memory)
    assert len(server.uploads) == 2
    assert server.uploads["up_1"]["state"] == "complete"


def test_a_folder_without_both_files_is_no_adapter(tmp_path):
    folder = make_adapter(tmp_path)
    (folder / WEIGHTS).unlink()
    with make_client(FakeUploads()) as client, pytest.raises(NotAnAdapter, match=WEIGHTS):
        client.push("mine", folder)


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


def test_the_key_goes_with_every_request():
    seen = []

    def serve(request):
        seen.append(request.headers["authorization"])
        return httpx.Response(200, json={})

    with make_client(serve) as client:
        client.request("GET", "/v1/models")
    assert seen == ["Bearer key"]


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
