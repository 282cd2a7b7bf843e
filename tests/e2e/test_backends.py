"""The product on S3 and on PostgreSQL: real servers, used as users do."""

import asyncio
import json
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from tests.e2e.conftest import TinyWorld
from tests.e2e.stack import Stack, Tenant, running
from tests.e2e.test_billing import check_bill, load
from tests.e2e.test_oracle import check_oracle

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@pytest.fixture(scope="module")
def s3_environment() -> Iterator[dict[str, str]]:
    """Run an S3 server with a bucket; yield the environment variables that reach it."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="adapters")
        yield environment
    server.stop()


@pytest.fixture(scope="module")
def on_s3(
    s3_environment: dict[str, str], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    settings = {"storage": "s3://adapters/prefix", "environment": s3_environment}
    with running(tmp_path_factory.mktemp("on-s3"), tiny_model, **settings) as stack:
        yield stack


def stored_digests(tenant: Tenant) -> set[str]:
    """Return the last parts of the tenant's keys in the bucket."""
    prefix = f"prefix/tenants/{tenant.tenant_id}/"
    listed = boto3.client("s3").list_objects_v2(Bucket="adapters", Prefix=prefix)["Contents"]
    return {entry["Key"].removeprefix(prefix) for entry in listed}


def test_adapters_travel_through_s3(
    on_s3: Stack, tiny_model: Path, tiny_adapters: dict[str, Path]
) -> None:
    tenant = on_s3.tenant("acme")
    for name, folder in tiny_adapters.items():
        tenant.push(name, folder)
    check_oracle(TinyWorld(on_s3, tenant, tiny_model, tiny_adapters), count=8)
    assert stored_digests(tenant) == {
        tenant.http.get(f"/v1/adapters/{name}").json()["latest"]["digest"] for name in tiny_adapters
    }
    engine = Path(f"/proc/{on_s3.pid('engine')}/environ").read_bytes()
    assert b"AWS_" not in engine, "only the fetcher and the gateway hold credentials"


def test_a_missing_object_fails_its_own_requests_and_nobody_else(
    on_s3: Stack, tiny_adapters: dict[str, Path]
) -> None:
    tenant = on_s3.tenant("globex")
    tenant.push("alpha", tiny_adapters["alpha"])
    tenant.push("gamma", tiny_adapters["gamma"])
    digest = tenant.http.get("/v1/adapters/alpha").json()["latest"]["digest"]
    key = f"prefix/tenants/{tenant.tenant_id}/{digest}"
    boto3.client("s3").delete_object(Bucket="adapters", Key=key)
    on_s3.restart_cold()
    body = {"prompt": "hello", "max_tokens": 4}
    lost = tenant.http.post("/v1/completions", json=body | {"model": "alpha"})
    assert lost.status_code == 502
    assert lost.json()["error"]["code"] == "adapter_missing"
    assert lost.headers["x-should-retry"] == "false"
    for model in ("gamma", "base"):
        answer = tenant.http.post("/v1/completions", json=body | {"model": model})
        assert answer.status_code == 200


def test_the_whole_road_on_postgresql(
    tmp_path: Path, tiny_model: Path, tiny_adapters: dict[str, Path], make_postgres
) -> None:
    url = make_postgres("template1")
    with running(
        tmp_path, tiny_model, fake_engine=True, max_model_len=512, database_url=url
    ) as stack:
        for name in ("acme", "globex"):
            stack.tenant(name).push("alpha", tiny_adapters["alpha"])
        seen = asyncio.run(load(stack, count=60, seed=5))
        assert seen.num_errors == 0
        check_bill(stack, seen)
        assert stack.tenants[0].http.get("/v1/adapters/alpha").status_code == 200


def test_a_journal_of_an_older_version_ends_serve_with_what_to_do(
    tmp_path: Path, tiny_model: Path
) -> None:
    body = b'["end",{"seq":1,"request_id":"r1"}]'
    journal = tmp_path / "data" / "engine" / "journal"
    journal.mkdir(parents=True)
    line = b"%08x %s\n" % (zlib.crc32(body), body)
    (journal / f"{1:020d}.journal").write_bytes(line)
    command = [sys.executable, "-m", "server.cli.main", "serve", "--model", str(tiny_model)]
    options = ["--data-dir", str(tmp_path / "data"), "--port", "0"]
    ended = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "another version: let that version settle it" in ended.stderr


def test_a_model_that_the_engine_refuses_ends_serve_with_the_reason(
    tmp_path: Path, tiny_model: Path
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    command = [sys.executable, "-m", "server.cli.main", "serve", "--model", str(model)]
    options = ["--data-dir", str(tmp_path / "data"), "--port", "0"]
    ended = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "cannot start with these settings" in ended.stderr
    assert "hidden_act gelu is not served" in ended.stderr
