"""An export that broke off at any byte is continued to the same file."""

import io
import json
import shutil
import sys

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.billing.exports import csv_rows, focus
from server.billing.exports.formats import FORMATS
from server.billing.exports.reading import read_export
from server.billing.exports.resuming import Whole, whole_part
from server.client.exports import download_export
from server.client.http import ApiRefused, Client, ServerUnreachable
from server.client.patience import Patience
from server.database.database import DEFAULT_FILE, Database
from tests.server.export_ledger import exported, fill, use
from tests.server.factories import NOW_MS

RESUMABLE = [format for format in FORMATS if format != "parquet"]


@pytest.fixture(scope="module")
def wholes(migrated_sqlite, tmp_path_factory):
    """A ledger, and its exports by format."""
    folder = tmp_path_factory.mktemp("ledger")
    shutil.copy(migrated_sqlite, folder / DEFAULT_FILE)
    database = Database(data_dir=folder)
    fill(database, 7, 30)
    yield database, {format: b"".join(exported(database, format)) for format in RESUMABLE}
    database.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(format=st.sampled_from(RESUMABLE), share=st.floats(0, 1))
def test_a_file_cut_at_any_byte_goes_on_to_the_same_bytes(wholes, format, share):
    database, files = wholes
    file = files[format]
    cut = file[: round(share * len(file))]
    whole = whole_part(io.BytesIO(cut), format)
    assert whole.size_bytes <= len(cut)
    rest = exported(database, format, after=whole.entry_id, through=2**40)
    assert cut[: whole.size_bytes] + b"".join(rest) == file


@pytest.mark.parametrize(("format", "most"), [("csv", 1), ("jsonl", 1), ("focus", 2)])
def test_no_more_is_fetched_again_than_what_broke_off(wholes, format, most):
    """FOCUS also fetches the last whole entry again, since more rows of it might have followed."""
    database, files = wholes
    whole = whole_part(io.BytesIO(files[format][:-1]), format)
    rest = b"".join(exported(database, format, after=whole.entry_id, through=2**40))
    assert 1 <= len(list(read_export(io.BytesIO(rest_with_header(format, rest))))) <= most


def rest_with_header(format, rest):
    return {"csv": csv_rows.HEADER, "focus": focus.HEADER}.get(format, b"") + rest


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("content", [b"", b"x", b"\n\n", b"<html>\n</html>\n", b"{}\n", b"\xff\n"])
def test_a_file_that_is_no_export_is_not_continued(format, content):
    assert whole_part(io.BytesIO(content), format) == Whole()


# ---- the client ----


class Server(httpx.BaseTransport):
    """Answers as the API does, but breaks off after each number of bytes in `cuts`, unless None."""

    def __init__(self, database, cuts):
        self.database = database
        self.cuts = iter(cuts)
        self.asked = []

    def handle_request(self, request):
        asked = dict(request.url.params)
        self.asked.append(asked)
        after = int(asked["after"]) if "after" in asked else None
        through = int(asked.get("through", THROUGH))
        content = exported(
            self.database, asked["format"], after=after, through=through, page_size=50
        )
        stream = Broken(b"".join(content), next(self.cuts, None))
        return httpx.Response(200, headers={"x-chorale-export-through": "30"}, stream=stream)


THROUGH = 30


class Broken(httpx.SyncByteStream):
    def __init__(self, content, cut):
        self.content = content
        self.cut = cut

    def __iter__(self):
        yield self.content[: self.cut]
        if self.cut is not None:
            raise httpx.ReadError("the connection broke")


def download(server, format, output, **changes):
    resumed, params = [], {"start": "2026-01-01", "end": None} | changes
    patience = Patience(max_failures=3, sleep=lambda _: None)
    with Client("http://gateway", "key", transport=server) as client:
        download_export(
            client, "/v1/usage/export", params, format, output,
            patience=patience, on_resume=resumed.append,
        )  # fmt: skip
    return resumed


def whole_of(database, format):
    return b"".join(exported(database, format, through=THROUGH))


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25
)
@given(format=st.sampled_from(RESUMABLE), cuts=st.lists(st.integers(0, 9000), max_size=3))
def test_a_download_that_breaks_goes_on_to_the_same_bytes(wholes, tmp_path, format, cuts):
    database, _ = wholes
    output = tmp_path / "usage"
    download(Server(database, cuts), format, output)
    assert output.read_bytes() == whole_of(database, format)
    assert [path.name for path in tmp_path.iterdir()] == ["usage"]
    output.unlink()


def test_what_a_killed_command_left_is_continued_by_the_same_command(wholes, tmp_path):
    database, _ = wholes
    output = tmp_path / "usage.csv"
    with pytest.raises(ServerUnreachable):
        download(Server(database, [3000, 0, 0, 0, 0]), "csv", output)
    assert not output.exists()
    server = Server(database, [])
    assert len(download(server, "csv", output)) == 1
    assert server.asked[0]["through"] == "30"
    assert server.asked[0]["start"] == "2026-01-01"
    assert output.read_bytes() == whole_of(database, "csv")


@pytest.mark.parametrize(
    "changes", [{"start": "2026-01-02"}, {"end": "2026-03-01"}, {"tenant": "x"}]
)
def test_another_export_begins_anew(wholes, tmp_path, changes):
    database, _ = wholes
    output = tmp_path / "usage.csv"
    with pytest.raises(ServerUnreachable):
        download(Server(database, [3000, 0, 0, 0, 0]), "csv", output)
    server = Server(database, [])
    assert download(server, "csv", output, **changes) == []
    assert "after" not in server.asked[0]
    assert output.read_bytes() == whole_of(database, "csv")


def test_a_start_that_was_not_given_stays_the_one_of_the_first_try(wholes, tmp_path):
    database, _ = wholes
    output = tmp_path / "usage.csv"
    servers = [Server(database, [3000, 0, 0, 0, 0]), Server(database, [])]
    with pytest.raises(ServerUnreachable):
        download(servers[0], "csv", output, start=None)
    note = json.loads((tmp_path / "usage.csv.part.json").read_text())
    assert note["start"] == servers[0].asked[0]["start"]
    (tmp_path / "usage.csv.part.json").write_text(json.dumps(note | {"start": "2025-12-01"}))
    download(servers[1], "csv", output, start=None)
    assert servers[1].asked[0]["start"] == "2025-12-01"


def test_patience_is_for_a_server_that_gets_nowhere(wholes, tmp_path):
    """Six breaks exceed the patience for failures in a row, but each comes after new receipts."""
    database, _ = wholes
    server = Server(database, [4000] * 6)
    assert len(download(server, "jsonl", tmp_path / "usage.jsonl")) == 6


@pytest.mark.parametrize(("format", "cuts"), [("parquet", [4000]), ("csv", [0]), ("csv", [300])])
def test_a_failure_that_cannot_be_continued_leaves_nothing(wholes, tmp_path, format, cuts):
    database, _ = wholes
    with pytest.raises(ServerUnreachable):
        download(Server(database, cuts * 9), format, tmp_path / "usage")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_what_the_server_refuses_or_a_key_interrupts_leaves_nothing(tmp_path, format):
    for error in (httpx.Response(501), KeyboardInterrupt()):

        def answer(_request, error=error):
            if isinstance(error, httpx.Response):
                return error
            raise error

        with pytest.raises((ApiRefused, KeyboardInterrupt)):
            download(httpx.MockTransport(answer), format, tmp_path / "usage")
        assert list(tmp_path.iterdir()) == []


def test_parquet_begins_again(wholes, tmp_path):
    database, _ = wholes
    server = Server(database, [4000])
    assert download(server, "parquet", tmp_path / "usage.parquet") == []
    assert (tmp_path / "usage.parquet").read_bytes() == whole_of(database, "parquet")


# ---- the API ----


def ids_of(answer):
    assert answer.status_code == 200, answer.text
    return [json.loads(line)["entry_id"] for line in answer.text.splitlines()]


def test_an_answer_says_through_where_it_goes_and_is_continued_behind_an_entry(product):
    acme, other = product.user("acme"), product.user("other")
    for user in (acme, other, acme, acme, other):
        use(product.gateway.database, user.tenant_id)
    path = f"/v1/usage/export?format=jsonl&start={NOW_MS // 1000}"
    answer = acme.call("GET", path)
    assert ids_of(answer) == [1, 3, 4]
    assert answer.headers["x-chorale-export-through"] == "4"
    assert answer.headers["content-disposition"] == 'attachment; filename="usage.jsonl"'
    use(product.gateway.database, acme.tenant_id)
    assert ids_of(acme.call("GET", f"{path}&after=1&through=4")) == [3, 4]
    assert ids_of(acme.call("GET", path)) == [1, 3, 4, 6]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("format=csv&after=1", "through"),
        ("format=csv&after=99&through=9", "after"),
        ("format=csv&after=2&through=9", "after"),  # another tenant's entry
        ("format=parquet&after=1&through=9", "after"),
        ("format=xml", "format"),
        ("start=never", "start"),
    ],
)
def test_what_cannot_be_exported_is_refused_by_name(product, query, param):
    acme, other = product.user("acme"), product.user("other")
    for user in (acme, other):
        use(product.gateway.database, user.tenant_id)
    answer = acme.call("GET", f"/v1/usage/export?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_operator_exports_all_tenants_or_one_by_name(product):
    users = [product.user(name) for name in ("acme", "other")]
    for user in (*users, *users):
        use(product.gateway.database, user.tenant_id)
    path = "/admin/v1/usage/export?format=jsonl&start=0"
    answer = product.operator.call("GET", path)
    order = sorted((user.tenant_id, i) for i, user in enumerate((*users, *users), 1))
    assert ids_of(answer) == [entry_id for _, entry_id in order]
    assert answer.headers["x-chorale-export-through"] == "4"
    assert ids_of(product.operator.call("GET", f"{path}&tenant=other")) == [2, 4]
    assert product.operator.call("GET", f"{path}&tenant=nobody").status_code == 404


def test_without_its_library_parquet_is_refused_with_what_to_install(product, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "server.billing.exports.parquet", raising=False)
    acme = product.user("acme")
    for method, path, body in (
        ("GET", "/v1/usage/export?format=parquet", None),
        ("PUT", "/v1/usage/exports/parquet", {"interval": "day"}),
    ):
        error = acme.call(method, path, body).json()["error"]
        assert error["code"] == "format_unavailable"
        assert "pip install -e '.[parquet]'" in error["message"]
