import os
import re
from pathlib import Path

import pytest

from server.launch.settings import InvalidSetting, load_settings
from server.launch.supervised_base import wanted_bases
from server.pool.control_files import ModelChanges


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
    with pytest.raises(InvalidSetting, match="max_loras in .*chorale.toml"):
        load_settings({}, path)


def test_an_unknown_variable_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setenv("CHORALE_MAX_LORAS", "4")
    with pytest.raises(InvalidSetting, match="CHORALE_MAX_LORAS in the environment"):
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


def write(tmp_path, text):
    path = tmp_path / "chorale.toml"
    path.write_text(text)
    return path


def test_a_models_own_table_wins_over_what_is_given_for_all(tmp_path):
    path = write(
        tmp_path,
        "max_num_seqs = 4\nmax_skips = 3\n"
        '[[models]]\nmodel = "a/one"\nmax_num_seqs = 7\ngpus = ["0"]\n'
        '[[models]]\nmodel = "two"\nmodel_name = "second"\n',
    )
    settings = load_settings({"block_size": 32}, path)
    first, second = settings.of_models()
    assert (first.model, first.model_id, first.models) == ("a/one", "one", ())
    assert (second.model, second.model_id) == ("two", "second")
    assert (first.max_num_seqs, second.max_num_seqs) == (7, 4)
    assert (first.gpus, second.gpus) == (("0",), None)
    for one in (first, second):
        assert (one.max_skips, one.block_size) == (3, 32)
        assert one.of_models() == (one,)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('model = "m"', "quantization: Input should be"),
        ('model = "m"\n[[models]]\nmodel = "n"', "give either `model`"),
        ('model_name = "x"\n[[models]]\nmodel = "n"', "model_name .*in the model's table"),
        ('[[models]]\nmodel = "m"\n[[models]]\nmodel_name = "n"', r"models\.1\.model: give"),
        (
            '[[models]]\nmodel = "m"\n[[models]]\nmodel = "n"\nengines = 0',
            r"models\.1\.engines: Input should be greater",
        ),
        (
            '[[models]]\nmodel = "m"\n[[models]]\nmodel = "n"\nquantisation = "int8"',
            r"models\.1\.quantisation in .*chorale\.toml is no setting of a model",
        ),
        (
            '[[models]]\nmodel = "m"\nmax_skips = 3',
            r"models\.0\.max_skips in .*chorale\.toml is no setting of a model",
        ),
        (
            '[[models]]\nmodel = "m"\n[[models]]\nmodel = "x/m"',
            r"models\.0\.model_name: 2 models are called m",
        ),
        ('[[models]]\nmodel = "m"\nmodel_name = "m@1"', r"models\.0\.model_name: 'm@1' cannot"),
        ("models = 3", "models: Input should be"),
        (
            '[[models]]\nmodel = "m"\nengines = 2\ntensor_parallel_size = 2\ngpus = ["0", "1"]',
            r"models\.0\.gpus: .*must name 4 GPUs",
        ),
    ],
)
def test_an_error_in_a_models_table_names_the_table_and_the_setting(tmp_path, text, error):
    flags = {"quantization": "int3"} if "quantization" in error else {}
    with pytest.raises(InvalidSetting, match=error):
        load_settings(flags, write(tmp_path, text))


def test_the_models_are_those_of_the_source_that_wins(tmp_path, monkeypatch):
    path = write(tmp_path, '[[models]]\nmodel = "a"\n[[models]]\nmodel = "b"\n')

    def names(flags):
        return [one.model_id for one in load_settings(flags, path).of_models()]

    assert names({}) == ["a", "b"]
    monkeypatch.setenv("CHORALE_MODEL", "c")
    assert names({}) == ["c"]
    assert names({"models": [{"model": "d"}, {"model": "e"}]}) == ["d", "e"]
    monkeypatch.delenv("CHORALE_MODEL")
    monkeypatch.setenv("CHORALE_MODELS", '[{"model": "f", "max_skips": 1}]')
    with pytest.raises(InvalidSetting, match=r"models\.0\.max_skips in the environment"):
        names({})
    assert names({"model": "g"}) == ["g"]


def test_the_engines_of_all_models_share_the_cores_but_one(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 13)
    path = write(
        tmp_path,
        '[[models]]\nmodel = "a"\nengines = 2\n[[models]]\nmodel = "b"\nthreads = 5\n'
        '[[models]]\nmodel = "c"\ntensor_parallel_size = 3\n',
    )
    found = wanted_bases(load_settings({}, path), ModelChanges())
    assert [one.settings and one.settings.threads for one in found] == [2, 5, 2]


def test_the_models_of_other_settings_are_taken_and_nothing_else_of_them(tmp_path):
    before = load_settings({"model": "a", "port": 1, "max_num_seqs": 2})
    after = load_settings({"models": [{"model": "b"}], "port": 2, "block_size": 32})
    (one,) = before.with_models_of(after).of_models()
    assert (one.model, one.port, one.max_num_seqs, one.block_size) == ("b", 1, None, 32)


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


def test_names_in_the_environment_have_commas_between_them(monkeypatch):
    monkeypatch.setenv("CHORALE_CORS_ORIGINS", "https://a.example, http://localhost:5173")
    origins = load_settings({"model": "m"}).cors_origins
    assert origins == ("https://a.example", "http://localhost:5173")
    monkeypatch.setenv("CHORALE_CORS_ORIGINS", '["https://a.example"]')
    with pytest.raises(InvalidSetting, match=r"^cors_origins: .* is no origin"):
        load_settings({"model": "m"})


@pytest.mark.parametrize(
    "wrong",
    ["*", "app.example", "https://a.example/", "https://a.example/path", "null", "ws://a.example",
     "https://A.example", "https://a.example:443", "http://[::1]:80", "http://a.example:x"],
)  # fmt: skip
def test_an_origin_is_what_a_browser_sends(wrong):
    for right in ("http://[::1]:8080", "https://a.example:80", "http://10.0.0.1"):
        assert load_settings({"model": "m", "cors_origins": [right]}).cors_origins == (right,)
    with pytest.raises(InvalidSetting, match=f"^cors_origins: '{re.escape(wrong)}' is no origin"):
        load_settings({"model": "m", "cors_origins": [wrong]})


def test_a_trusted_proxy_is_an_address_or_a_network(monkeypatch):
    monkeypatch.setenv("CHORALE_TRUSTED_PROXIES", "10.0.0.0/8,fd00::1")
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


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({"redis_url": "redis://localhost"}, "database_url: SQLite serves one gateway"),
        ({"database_url": "sqlite:///x", "redis_url": "redis://localhost"}, "database_url: SQLite"),
        ({"database_url": "postgresql://localhost/x"}, "redis_url: several gateways"),
    ],
)
def test_several_gateways_are_refused_without_what_they_share(given, wrong):
    with pytest.raises(InvalidSetting, match=f"^{wrong}"):
        load_settings({"model": "m", "gateways": 2, **given})
    assert load_settings({"model": "m", "gateways": 1, **given}).gateways == 1
