from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from registry.storage.storage import LocalStorage
from registry.storage.url import S3Location, open_storage, parse_storage_url
from tests.faulty_s3 import CREDENTIALS
from tests.registry.factories import keys


@pytest.mark.parametrize(
    "url",
    ["", "/tmp/x", "http://x/y", "s3://", "s3:///prefix", "s3://bucket#x", "s3://bucket:80"]
    + ["file://host/x", "file:", "file:///x?region=a", "file:///x#y"],
)
def test_a_url_of_another_kind_is_refused(url):
    with pytest.raises(ValueError, match="Storage is"):
        parse_storage_url(url)


def test_a_file_url_names_a_folder():
    storage = open_storage("file:///tmp/a%20b")
    assert isinstance(storage, LocalStorage)
    assert storage.root == Path("/tmp/a b").resolve()


def test_an_s3_url_names_a_bucket_and_a_prefix():
    assert parse_storage_url("s3://bucket") == S3Location("bucket")
    assert parse_storage_url("s3://bucket/") == S3Location("bucket")
    assert parse_storage_url("s3://bucket/a/b%20c/") == S3Location("bucket", "a/b c")


def test_an_s3_url_carries_the_stores_settings():
    endpoint = "https://minio.example.com:9000"
    key_id = "arn:aws:kms:eu-west-1:111122223333:key/1234abcd"
    for shown, shown_id in ((endpoint, key_id), (quote(endpoint, ""), quote(key_id, ""))):
        url = f"s3://bucket/p?endpoint_url={shown}&region=eu-west-1&addressing_style=path"
        assert parse_storage_url(f"{url}&sse=aws:kms&kms_key_id={shown_id}") == S3Location(
            "bucket", "p", endpoint, "eu-west-1", "path", "aws:kms", key_id
        )


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("regoin=eu-west-1", "'regoin'.*endpoint_url, region, addressing_style, sse, kms_key_id"),
        ("Region=eu-west-1", "'Region'"),
        ("region=", "region"),
        ("region", "region"),
        ("region=a&region=b", "region"),
        ("region=a b", "region"),
        ("addressing_style=vhost", "addressing_style.*path, virtual, auto"),
        ("sse=aes", "sse.*AES256, aws:kms"),
        ("kms_key_id=k", "kms_key_id.*sse=aws:kms"),
        ("kms_key_id=k&sse=AES256", "kms_key_id.*sse=aws:kms"),
        ("endpoint_url=minio:9000", "endpoint_url"),
        ("endpoint_url=ftp://minio", "endpoint_url"),
        ("endpoint_url=http://", "endpoint_url"),
        ("endpoint_url=http://minio?x=y", "endpoint_url"),
    ],
)
def test_a_setting_that_is_unknown_or_contradicts_another_is_named(query, words):
    with pytest.raises(ValueError, match=words):
        parse_storage_url(f"s3://bucket/p?{query}")


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:hunter2@bucket/p",
        "s3://hunter2@bucket",
        "s3://bucket?aws_secret_access_key=hunter2",
        "s3://bucket?endpoint_url=https://AKIA:hunter2@minio:9000",
        "http://AKIA:hunter2@bucket",
        "s3://bucket?region=hunter2!",
    ],
)
def test_a_url_with_credentials_is_refused_and_not_repeated(url):
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        parse_storage_url(url)
    assert "hunter2" not in str(refusal.value)


@pytest.fixture
def credentials(monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def host_and_path(url):
    presigned = urlsplit(open_storage(url).presign_part("a/b", "id", 1, 7, 60))
    return presigned.netloc, presigned.path


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("path", ("minio.example.com", "/bucket/p/a/b")),
        ("auto", ("minio.example.com", "/bucket/p/a/b")),
        ("virtual", ("bucket.minio.example.com", "/p/a/b")),
    ],
)
def test_the_addressing_style_says_where_the_bucket_stands(credentials, style, expected):
    url = f"s3://bucket/p?endpoint_url=https://minio.example.com&addressing_style={style}"
    assert host_and_path(url) == expected


def test_the_region_is_the_urls_before_the_environments(credentials):
    presigned = open_storage("s3://bucket?region=eu-west-1").presign_part("k", "id", 1, 7, 60)
    assert "%2Feu-west-1%2Fs3%2F" in presigned


def test_an_endpoint_may_come_from_the_environment(credentials):
    credentials.setenv("AWS_ENDPOINT_URL", "https://minio.example.com")
    assert host_and_path("s3://bucket") == ("minio.example.com", "/bucket/a/b")


def test_objects_lie_under_the_urls_prefix(bucket, s3, tmp_path):
    source = tmp_path / "source"
    source.write_bytes(b"x")
    open_storage(f"s3://bucket/some/prefix/?endpoint_url={s3.url}").put("k", source)
    assert keys(bucket, "some/") == ["some/prefix/k"]
