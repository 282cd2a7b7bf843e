"""An adapter's bytes go straight to the bucket, by plain HTTP PUT, and are served from there."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.faulty_s3 import CREDENTIALS, FaultyS3
from tests.e2e.stack import FILES, Stack, Tenant, running
from tests.signed_s3 import signed_s3


@pytest.fixture(scope="module")
def s3() -> Iterator[FaultyS3]:
    with signed_s3() as (s3, _):
        yield s3


@pytest.fixture(scope="module")
def stack(
    s3: FaultyS3, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    settings = {"storage": f"s3://bucket?endpoint_url={s3.url}", "max_model_len": 256}
    folder = tmp_path_factory.mktemp("presigned-stack")
    with running(
        folder, tiny_model, fake_engine=True, environment=CREDENTIALS, **settings
    ) as stack:
        yield stack


@pytest.fixture(scope="module")
def tenant(stack: Stack) -> Tenant:
    return stack.tenant("acme")


@pytest.fixture
def files(tiny_adapters: dict[str, Path]) -> dict[str, bytes]:
    return {name: (tiny_adapters["alpha"] / name).read_bytes() for name in FILES}


def create(tenant: Tenant, name: str, files: dict[str, bytes]) -> dict:
    declared = {
        file: {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for file, data in files.items()
    }
    body = {"files": declared, "transfer": "presigned"}
    answer = tenant.http.post(f"/v1/adapters/{name}/uploads", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


def put(url: str, data: bytes) -> int:
    """PUT as curl does, without a key of ours or of the bucket; return the status."""
    return httpx.put(url, content=data, trust_env=False).status_code


def test_parts_put_to_their_urls_become_an_adapter_that_is_served(
    tenant: Tenant, files: dict[str, bytes]
) -> None:
    upload = create(tenant, "direct", files)
    shown = upload
    for name in FILES:
        (part,) = shown["files"][name]["parts"]
        assert (part["number"], part["start"], part["size_bytes"]) == (1, 0, len(files[name]))
        assert put(part["url"], files[name]) == 200
        # The upload is read again, which is how an interrupted upload finds its missing parts.
        shown = tenant.http.get(f"/v1/uploads/{upload['id']}").json()
        assert shown["files"][name]["parts"] == []
        assert shown["files"][name]["received_bytes"] == len(files[name])
    answer = tenant.http.post(f"/v1/uploads/{upload['id']}/complete")
    assert answer.status_code == 200, answer.text
    digest = answer.json()["version"]["digest"]
    body = {"model": "direct", "prompt": "ab", "max_tokens": 2}
    served = tenant.http.post("/v1/completions", json=body)
    assert served.status_code == 200, served.text
    assert served.headers["x-chorale-adapter-digest"] == digest


def test_the_gateway_takes_no_part_of_it(tenant: Tenant, files: dict[str, bytes]) -> None:
    upload = create(tenant, "other", files)
    name = FILES[0]
    answer = tenant.http.put(f"/v1/uploads/{upload['id']}/files/{name}", content=files[name])
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "upload_is_presigned")
    missing = tenant.http.post(f"/v1/uploads/{upload['id']}/complete")
    assert (missing.status_code, missing.json()["error"]["code"]) == (409, "upload_not_complete")


def test_another_size_and_another_tenant_get_nowhere(
    stack: Stack, tenant: Tenant, files: dict[str, bytes]
) -> None:
    upload = create(tenant, "third", files)
    (part,) = upload["files"][FILES[0]]["parts"]
    assert put(part["url"], files[FILES[0]] + b" ") == 403
    assert put(part["url"].replace("partNumber=1", "partNumber=2"), files[FILES[0]]) == 403
    stranger = stack.tenant("globex")
    assert stranger.http.get(f"/v1/uploads/{upload['id']}").status_code == 404


def test_bytes_other_than_declared_are_refused_and_leave_nothing(
    tenant: Tenant, files: dict[str, bytes]
) -> None:
    upload = create(tenant, "broken", files)
    for name, file in upload["files"].items():
        assert put(file["parts"][0]["url"], bytes(len(files[name]))) == 200
    answer = tenant.http.post(f"/v1/uploads/{upload['id']}/complete")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "digest_mismatch")
    shown = tenant.http.get(f"/v1/uploads/{upload['id']}").json()
    assert (shown["state"], shown["error"]["code"]) == ("failed", "digest_mismatch")
