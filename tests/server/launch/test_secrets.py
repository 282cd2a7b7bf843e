import stat
import threading

import pytest

from server.launch.secrets import (
    SecretError,
    SecretMissing,
    Secrets,
    load_or_create_secret,
)


def test_processes_that_start_at_once_get_the_same_secret(tmp_path):
    found, start = [], threading.Barrier(8)

    def load():
        start.wait()
        found.append(load_or_create_secret(tmp_path / "pepper"))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_an_empty_secret_is_an_error(tmp_path):
    (tmp_path / "pepper").write_text("\n")
    with pytest.raises(SecretError, match="pepper is empty"):
        load_or_create_secret(tmp_path / "pepper")


def test_what_one_gateway_alone_needs_is_made_and_kept(tmp_path):
    made = Secrets.load(tmp_path)
    assert Secrets.load(tmp_path) == Secrets.load(tmp_path, may_make=False) == made
    assert made.pepper != made.receipt_signing_key
    assert made.pepper not in repr(made)
    files = sorted((tmp_path / "secrets").iterdir())
    assert [file.name for file in files] == ["pepper", "receipt_signing_key"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_what_gateways_share_is_never_made_but_asked_for(tmp_path, monkeypatch):
    with pytest.raises(
        SecretMissing, match="secrets/pepper, and CHORALE_PEPPER is not.*openssl rand -hex 32"
    ):
        Secrets.load(tmp_path, may_make=False)
    monkeypatch.setenv("CHORALE_PEPPER", "a" * 64)
    with pytest.raises(SecretMissing, match="CHORALE_RECEIPT_SIGNING_KEY"):
        Secrets.load(tmp_path, may_make=False)
    assert not list(tmp_path.iterdir())
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "receipt_signing_key").write_text("b" * 64 + "\n")
    assert Secrets.load(tmp_path, may_make=False) == Secrets("a" * 64, "b" * 64)


def test_the_environment_wins_over_the_file(tmp_path, monkeypatch):
    Secrets.load(tmp_path)
    monkeypatch.setenv("CHORALE_PEPPER", "a" * 64)
    assert Secrets.load(tmp_path).pepper == "a" * 64


@pytest.mark.parametrize("secret", ["a" * 63, "a" * 65, "g" * 64, "secret", "a" * 32])
def test_a_secret_that_is_not_32_bytes_in_hex_is_refused_and_not_shown(
    tmp_path, monkeypatch, secret
):
    monkeypatch.setenv("CHORALE_RECEIPT_SIGNING_KEY", secret)
    with pytest.raises(SecretError, match="CHORALE_RECEIPT_SIGNING_KEY") as refused:
        Secrets.load(tmp_path)
    assert secret not in str(refused.value)
