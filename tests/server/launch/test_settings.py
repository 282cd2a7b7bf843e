import os
from pathlib import Path

import pytest

from server.launch.settings import InvalidSetting, UnknownSetting, load_settings


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("CHORALE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "chorale.toml"
    path.write_text('model = "from-file"\nport = 1\nmax_num_seqs = 1\n')
    return path


def test_flags_win_over_the_environment_and_the_environment_over_the_file(config, monkeypatch):
    monkeypatch.setenv("CHORALE_PORT", "2")
    monkeypatch.setenv("CHORALE_MAX_NUM_SEQS", "2")
    settings = load_settings({"port": 3}, config)
    assert (settings.model, settings.max_num_seqs, settings.port) == ("from-file", 2, 3)


def test_a_flag_that_was_not_given_decides_nothing(config):
    assert load_settings({"model": None, "port": None}, config).port == 1


def test_an_unknown_key_of_the_file_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "chorale.toml"
    path.write_text('model = "m"\nmax_loras = 4\n')
    with pytest.raises(UnknownSetting, match="max_loras in .*chorale.toml"):
        load_settings({}, path)


def test_an_unknown_variable_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setenv("CHORALE_MAX_LORAS", "4")
    with pytest.raises(UnknownSetting, match="CHORALE_MAX_LORAS in the environment"):
        load_settings({"model": "m"})


@pytest.mark.parametrize("name", ["URL", "API_KEY", "ADMIN_KEY", "CONFIG"])
def test_variables_of_the_client_commands_are_no_settings(name, monkeypatch):
    plain = load_settings({"model": "m"})
    monkeypatch.setenv(f"CHORALE_{name}", "x")
    assert load_settings({"model": "m"}) == plain


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 70000),
        ("device", "tpu"),
        ("arena_bytes", 0),
        ("drain_timeout_s", -1),
        ("quantization", "int3"),
        ("batch_invariant", "sometimes"),
        ("speculation", "always"),
        ("draft_pool_bytes", -1),
        ("pad_events_to", 70000),
        ("storage", "s3://bucket?sse=maybe"),
        ("storage", "/srv/objects"),
        ("engines", 0),
        ("engines", 65),
        ("max_engines", 65),
        ("tensor_parallel_size", 9),
        ("slo_first_token_s", 0),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_the_setting(name, value):
    with pytest.raises(InvalidSetting, match=name):
        load_settings({"model": "m", name: value})


def test_without_a_model_nothing_is_served():
    with pytest.raises(InvalidSetting, match="model"):
        load_settings({})


def test_a_model_is_called_after_its_folder_unless_it_is_named():
    assert load_settings({"model": "/models/smol"}).model_id == "smol"
    assert load_settings({"model": "/models/smol", "model_name": "base"}).model_id == "base"


def test_objects_lie_in_the_data_directory_unless_a_store_is_given(tmp_path):
    local = load_settings({"model": "m", "data_dir": tmp_path})
    assert local.storage_url == (tmp_path / "objects").as_uri()
    s3 = load_settings({"model": "m", "storage": "s3://bucket/prefix"})
    assert s3.storage_url == "s3://bucket/prefix"


def test_a_list_in_the_environment_is_json(monkeypatch):
    monkeypatch.setenv("CHORALE_PUBLIC_PROMPTS", '["You are kind.", "Be brief."]')
    assert load_settings({"model": "m"}).public_prompts == ("You are kind.", "Be brief.")
    monkeypatch.setenv("CHORALE_PUBLIC_PROMPTS", "You are kind.")
    with pytest.raises(InvalidSetting, match="public_prompts"):
        load_settings({"model": "m"})


def test_a_trusted_proxy_is_an_address_or_a_network(monkeypatch):
    monkeypatch.setenv("CHORALE_TRUSTED_PROXIES", '["10.0.0.0/8", "fd00::1"]')
    assert load_settings({"model": "m"}).trusted_proxies == ("10.0.0.0/8", "fd00::1")
    for wrong in ("proxy", "10.0.0.1/8", "300.0.0.1"):
        with pytest.raises(InvalidSetting, match=f"trusted_proxies: .*{wrong}"):
            load_settings({"model": "m", "trusted_proxies": [wrong]})


def test_there_cannot_be_more_engines_than_the_most():
    with pytest.raises(InvalidSetting, match="max_engines: .*must be at least `engines`"):
        load_settings({"model": "m", "engines": 3, "max_engines": 2})
    assert load_settings({"model": "m", "engines": 3}).most_engines == 3
    assert load_settings({"model": "m", "engines": 3, "max_engines": 5}).most_engines == 5


@pytest.mark.parametrize(
    ("cores", "given", "threads"),
    [
        (1, {}, 1),
        (9, {}, 8),
        (9, {"engines": 2}, 4),
        (9, {"engines": 1, "max_engines": 4}, 2),
        (9, {"engines": 2, "tensor_parallel_size": 2}, 2),
        (4, {"engines": 64}, 1),
        (4, {"engines": 2, "threads": 3}, 3),
    ],
)
def test_all_engines_that_may_run_share_the_cores_but_one(monkeypatch, cores, given, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert load_settings({"model": "m", **given}).threads == threads


def test_numbers_in_the_environment_are_numbers(monkeypatch):
    for name, value in {"ENGINES": "2", "MAX_ENGINES": "3", "TENSOR_PARALLEL_SIZE": "4"}.items():
        monkeypatch.setenv(f"CHORALE_{name}", value)
    settings = load_settings({"model": "m"})
    assert (settings.engines, settings.max_engines, settings.tensor_parallel_size) == (2, 3, 4)
