import os
import stat

import pytest

from server.accounts.admin_key import AdminKey
from server.launch.secrets import load_admin_key, replace_secret
from tests.server.factories import Clock


def test_the_admin_key_is_made_once_and_kept_from_others(tmp_path):
    first, again = load_admin_key(tmp_path), load_admin_key(tmp_path)
    assert (first.is_new, again.is_new) == (True, False)
    assert first.key == again.key == (tmp_path / "admin.key").read_text().strip()
    assert stat.S_IMODE((tmp_path / "admin.key").stat().st_mode) == 0o600


def test_a_given_admin_key_is_written_nowhere_and_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("CHORALE_ADMIN_KEY", "given")
    assert load_admin_key(tmp_path).key == "given"
    assert not list(tmp_path.iterdir())
    (tmp_path / "admin.key").write_text("from the file")
    assert load_admin_key(tmp_path).is_it("given")


def test_a_running_gateway_takes_a_new_key_from_the_file_within_a_second(tmp_path):
    path, clock = tmp_path / "admin.key", Clock()
    old = replace_secret(path)
    key = AdminKey(old, path, monotonic=clock)
    new = replace_secret(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    clock.now += 0.99
    assert key.is_it(old)
    clock.now += 0.01
    assert key.is_it(new)
    assert not key.is_it(old)


@pytest.mark.parametrize("spoil", [os.unlink, lambda path: path.write_text("\n")])
def test_without_a_key_in_the_file_the_last_one_stays(tmp_path, spoil):
    path, clock = tmp_path / "admin.key", Clock()
    key = AdminKey(replace_secret(path), path, monotonic=clock)
    last = key.key
    spoil(path)
    clock.now += 5
    assert key.is_it(last)
    assert not key.is_it("")
    new = replace_secret(path)
    clock.now += 5
    assert key.is_it(new)


@pytest.mark.parametrize("presented", ["", "the ke", "the keyy", "\xe9", "the key\0"])
def test_nothing_but_the_key_is_the_key(presented):
    key = AdminKey("the key")
    assert key.is_it("the key")
    assert not key.is_it(presented)
