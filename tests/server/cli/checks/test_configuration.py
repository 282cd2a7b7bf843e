"""Faults of secrets, keys, models and ports, on real files and sockets."""

import json
import shutil
import socket

import pytest

from registry.base.base_model import UnsupportedBaseModel
from server.cli.checks.configuration import (
    check_model,
    check_port,
    check_private_files,
    check_secrets,
)
from server.launch.secrets import SecretMissing, Secrets
from server.launch.settings import Settings
from tests.server.in_process import DEMO


@pytest.fixture
def settings(tmp_path):
    return Settings(model=str(DEMO), data_dir=tmp_path)


def test_secrets_are_made_at_the_first_start_unless_gateways_share_them(settings):
    assert check_secrets(settings).verdict == "ok"
    assert not list(settings.data_dir.iterdir())
    with pytest.raises(SecretMissing, match="CHORALE_PEPPER"):
        check_secrets(settings.model_copy(update={"redis_url": "redis://here"}))


def test_a_pepper_that_is_lost_beside_a_ledger_is_wrong_before_a_start_makes_a_new_one(settings):
    Secrets.load(settings.data_dir)
    (settings.data_dir / "chorale.db").touch()
    assert check_secrets(settings).verdict == "ok"
    (settings.data_dir / "secrets" / "pepper").unlink()
    finding = check_secrets(settings)
    assert finding.verdict == "wrong"
    assert "every API key is refused" in finding.todo


def test_a_key_that_others_may_read_is_named_with_the_command_that_closes_it(tmp_path):
    Secrets.load(tmp_path)
    assert check_private_files(tmp_path).verdict == "ok"
    pepper = tmp_path / "secrets" / "pepper"
    pepper.chmod(0o644)
    finding = check_private_files(tmp_path)
    assert (finding.verdict, finding.found) == ("wrong", f"Others may read {pepper}.")
    assert f"chmod 600 {pepper}" in finding.todo


def test_a_whole_model_is_well_and_a_name_that_is_no_folder_may_be_the_hubs(settings):
    assert check_model(settings).verdict == "ok"
    absent = settings.model_copy(update={"model": "org/model"})
    assert check_model(absent).verdict == "warning"


def test_a_missing_shard_and_a_file_that_is_cut_off_are_named(settings, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    of_folder = settings.model_copy(update={"model": str(folder)})
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-7])
    with pytest.raises(UnsupportedBaseModel, match=r"model\.safetensors"):
        check_model(of_folder)
    weights.rename(folder / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedBaseModel, match=r"b\.safetensors"):
        check_model(of_folder)


def test_a_port_is_free_or_a_gateways_or_wrong(settings):
    with socket.create_server(("127.0.0.1", 0)) as other:
        of_port = settings.model_copy(update={"port": other.getsockname()[1]})
        assert "A gateway listens" in check_port(of_port, lambda: "1.0.0").found
        finding = check_port(of_port, lambda: None)
        assert (finding.verdict, "ss -ltnp" in finding.todo) == ("wrong", True)
    assert "is free" in check_port(of_port, lambda: None).found
