import dataclasses
import json
import socket
import stat
import sys
from pathlib import Path

import pytest

import demo
from engine.config import EngineConfig, EngineSettings
from engine.wire.encoding import read_vocabulary
from registry.extras import ExtraMissing
from server.launch.errors import (
    AddressInUse,
    ServeError,
)
from server.launch.model_folder import find_model
from server.launch.prepare import prepare, resolve_settings
from server.launch.secrets import SecretMissing
from server.launch.settings import Settings
from server.pool.control_files import members_file, wanted_file
from server.text.tokenizer import Tokenizer

MODEL = Path(demo.__file__).parent / "model"


def make_settings(tmp_path, **values):
    values = {"model": str(MODEL), "data_dir": tmp_path / "data", "port": 0, **values}
    return resolve_settings(Settings(**values))


def prepare_all(tmp_path, **values):
    settings = make_settings(tmp_path, **values)
    return settings, {spec.name: spec for spec in prepare(settings)()}


def give_secrets(monkeypatch):
    """Set the shared secrets in the environment; return their names."""
    names = ("CHORALE_PEPPER", "CHORALE_RECEIPT_SIGNING_KEY")
    for name in names:
        monkeypatch.setenv(name, "0" * 64)
    return names


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_engine_reads_back_every_setting_that_it_has(tmp_path):
    given = {"max_num_seqs": 7, "threads": 3, "max_fetches": 3, "max_pinned_share": 0.25}
    settings, _ = prepare_all(tmp_path, **given, leave_timeout_s=70.0)
    config = EngineConfig(**json.loads((settings.data_dir / "engine.json").read_text()))
    for name in (
        "threads",
        "hold_lifetime_s",
        *(f.name for f in dataclasses.fields(EngineSettings)),
    ):
        assert getattr(config, name) == getattr(settings, name)
    assert config.model_dir == str(MODEL)
    assert read_vocabulary(Path(config.vocabulary_path))[-1]


def test_the_engine_is_told_of_a_draft_model_by_its_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings, _ = prepare_all(tmp_path, draft_model="small")
    written = json.loads((settings.data_dir / "engine.json").read_text())
    assert written["draft_model_dir"] == str(tmp_path / "small")


def test_the_gateway_reads_back_its_settings_and_no_one_else_can(tmp_path, monkeypatch):
    give_secrets(monkeypatch)
    url = "postgresql://chorale:secret@localhost/chorale"
    settings, _ = prepare_all(tmp_path, database_url=url)
    path = settings.data_dir / "gateway.json"
    written = json.loads(path.read_text())
    assert Settings.model_validate(written["settings"]) == settings
    assert mode(path) == 0o600
    assert "secret" not in (settings.data_dir / "engine.json").read_text()


def test_each_process_gets_only_the_credentials_that_it_needs(tmp_path, monkeypatch):
    names = ("AWS_SECRET_ACCESS_KEY", "CHORALE_ADMIN_KEY", "CHORALE_DATABASE_URL", "HF_TOKEN",
             "OTEL_EXPORTER_OTLP_HEADERS")  # fmt: skip
    for name in names:
        monkeypatch.setenv(name, "secret")
    names += give_secrets(monkeypatch)
    _, specs = prepare_all(tmp_path, threads=3)
    given = {name: {n for n in names if n in spec.environment} for name, spec in specs.items()}
    assert given["engine"] == set()
    assert given["fetcher"] == {"AWS_SECRET_ACCESS_KEY"}
    assert given["gateway"] == set(names)
    assert specs["engine"].environment["OMP_NUM_THREADS"] == "3"


def test_the_gateway_may_drain_before_it_is_killed(tmp_path):
    _, specs = prepare_all(tmp_path, drain_timeout_s=40.0)
    assert specs["gateway"].stop_timeout_s > 80.0


def test_a_port_in_use_is_said_before_anything_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{port}.*--port"):
            make_settings(tmp_path, port=port)


def test_a_path_too_long_for_its_sockets_is_refused(tmp_path):
    with pytest.raises(ServeError, match="too long for the sockets"):
        make_settings(tmp_path, data_dir=tmp_path / ("x" * 100))


def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub():
    with pytest.raises(ServeError, match="no such folder, and no hub id either"):
        find_model("/nowhere/at/all")


def test_of_a_repository_with_the_weights_twice_one_form_is_downloaded(tmp_path, monkeypatch):
    from fnmatch import fnmatch

    files = ["config.json", "model-00001-of-00002.safetensors", "consolidated.safetensors", "a.bin"]
    got = []

    def snapshot_download(name, allow_patterns, ignore_patterns):
        got.extend(
            file for file in files
            if any(fnmatch(file, it) for it in allow_patterns)
            and not any(fnmatch(file, it) for it in ignore_patterns)
        )  # fmt: skip
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert find_model("mistralai/Mistral-Small") == tmp_path
    assert got == files[:2]


def test_a_folder_without_a_model_is_named(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ServeError, match="config.json"):
        prepare_all(tmp_path, model=str(tmp_path / "model"))


def test_no_context_is_longer_than_the_model_was_made_for(tmp_path):
    with pytest.raises(ServeError, match="1025.*1024"):
        prepare_all(tmp_path, max_model_len=1025)


@pytest.mark.parametrize(
    ("given", "package"),
    [
        ({"database_url": "postgresql://localhost/x"}, "psycopg"),
        ({"storage": "s3://bucket/prefix"}, "boto3"),
        ({"ray": "local"}, "ray"),
    ],
)
def test_what_needs_a_package_that_is_missing_starts_nothing(tmp_path, monkeypatch, given, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ExtraMissing, match=package):
        prepare_all(tmp_path, **given)


@pytest.mark.parametrize(
    "shared", [{"database_url": "postgresql://localhost/x"}, {"redis_url": "redis://localhost"}]
)
def test_what_gateways_share_must_be_given_before_anything_starts(tmp_path, shared):
    with pytest.raises(SecretMissing, match="CHORALE_PEPPER"):
        prepare_all(tmp_path, **shared)


def test_a_public_prompt_becomes_the_tokens_that_chats_and_completions_begin_with(tmp_path):
    settings, _ = prepare_all(tmp_path, public_prompts=["You are kind."], scheduling_policy="fcfs")
    config = EngineConfig(**json.loads((settings.data_dir / "engine.json").read_text()))
    assert config.scheduling_policy == "fcfs"
    tokenizer = Tokenizer(MODEL)
    text, chat = config.public_prefixes
    assert list(text) == tokenizer.encode("You are kind.")
    messages = [
        {"role": "system", "content": "You are kind."},
        {"role": "user", "content": "Anything else?"},
    ]
    prompt = tokenizer.encode(tokenizer.chat_template.render(messages), add_special_tokens=False)
    assert tuple(prompt[: len(chat)]) == chat
    assert len(chat) > len(text)


# ---- several engines ----


def test_each_engine_has_a_folder_a_configuration_and_a_name_of_its_own(tmp_path):
    settings, specs = prepare_all(tmp_path, engines=3, max_num_seqs=7)
    assert list(specs) == ["fetcher", "engine", "engine-2", "engine-3", "gateway"]
    configs = {}
    for name in ("engine", "engine-2", "engine-3"):
        path = settings.data_dir / f"{name}.json"
        assert specs[name].command[-1] == str(path)
        assert mode(path) == 0o600
        configs[name] = EngineConfig(**json.loads(path.read_text()))
        assert configs[name].data_dir == str(settings.data_dir / name)
    first, *others = (dataclasses.replace(c, data_dir="") for c in configs.values())
    assert others == [first, first], "all other fields are the same"
    members = members_file(settings.data_dir).read()
    assert [member.name for member in members] == list(configs)


def test_the_reserve_and_the_spools_folder_reach_the_processes(tmp_path):
    settings, specs = prepare_all(
        tmp_path, disk_reserve_bytes=7, spool_dir=tmp_path / "a" / ".." / "spool"
    )
    assert specs["fetcher"].command[-2:] == ("--reserve-bytes", "7")
    assert settings.spool_dir == tmp_path / "spool"
    written = json.loads((settings.data_dir / "gateway.json").read_text())["settings"]
    assert written["spool_dir"] == str(tmp_path / "spool")


def test_gateways_stop_before_engines_and_engines_before_the_fetcher(tmp_path):
    _, specs = prepare_all(tmp_path, engines=2)
    stages = {name: spec.stage for name, spec in specs.items()}
    assert stages["gateway"] > stages["engine"] == stages["engine-2"] > stages["fetcher"]


def test_the_beats_of_all_processes_of_a_machine_are_watched(tmp_path):
    _, specs = prepare_all(tmp_path, engines=2)
    watched = {name for name, spec in specs.items() if spec.first_beat_s is not None}
    assert watched == specs.keys() == {"engine", "engine-2", "fetcher", "gateway"}


def test_an_engine_that_has_to_go_has_the_time_that_it_takes_itself(tmp_path):
    _, specs = prepare_all(tmp_path, leave_timeout_s=70.0)
    assert specs["engine"].leave_timeout_s > 70.0


def test_what_is_left_of_an_engine_is_settled_as_the_model_that_it_ran_on(tmp_path):
    settings, _ = prepare_all(tmp_path, engines=2)
    (settings.data_dir / "engine-2" / "journal").mkdir()
    path = settings.data_dir / "engine-2.json"
    older = json.loads(path.read_text()) | {"base_revision": "older", "data_dir": "/moved/from"}
    path.write_text(json.dumps(older))
    _, specs = prepare_all(tmp_path, request_timeout_s=33.0)
    assert specs["engine-2"].command[1:] == ("-m", "engine.retired", str(path))
    config = EngineConfig(**json.loads(path.read_text()))
    assert config.base_revision == "older"
    assert config.data_dir == str(settings.data_dir / "engine-2")
    assert config.hold_lifetime_s == 93.0
    path.unlink()
    prepare_all(tmp_path)
    assert json.loads(path.read_text())["base_revision"] != "older"


def test_engines_of_one_machine_share_its_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    given = {"engines": 1, "max_engines": 2, "tensor_parallel_size": 2}
    bases = prepare(make_settings(tmp_path, **given))
    wanted_file(tmp_path / "data").write(2)
    gpus = {spec.name: spec.environment["CUDA_VISIBLE_DEVICES"] for spec in bases()}
    assert (gpus["engine"], gpus["engine-2"]) == ("4,5", "6,7")
    with pytest.raises(ServeError, match="3 engines of 2 GPUs need 6, and there are 4"):
        prepare_all(tmp_path, engines=3, tensor_parallel_size=2)
    on_cpus = prepare_all(tmp_path, engines=3, tensor_parallel_size=2, device="cpu")[1]
    assert on_cpus["engine-3"].environment["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
