"""The validator's process: its answers, its limits, and the errors when it fails or dies."""

import functools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from registry.checks.validate import AdapterLimits
from registry.checks.validator import Validator, ValidatorLimits
from registry.errors import InvalidAdapter, TooLarge
from registry.formats.own_tokenizer import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG
from registry.formats.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES
from registry.formats.peft_format import WEIGHTS_FILE
from tests.refusals import refused
from tests.registry.factories import (
    encode,
    encode_header,
    make_adapter,
    make_base,
    make_config,
    make_tensor,
    sha256,
    validate_adapter,
)
from tests.tokenizer_families import make_tokenizer

ROOT = Path(__file__).resolve().parents[2]
LIMITS = AdapterLimits()


@pytest.fixture
def files(base, tmp_path):
    """The paths of a sound config and its weights."""
    config, weights = tmp_path / CONFIG_FILE, tmp_path / WEIGHTS_FILE
    config.write_bytes(make_config())
    weights.write_bytes(encode(make_adapter(base)))
    return config, weights


def pretender(tmp_path, script):
    """The path of a fake Python interpreter that runs `script` whatever its arguments are."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


def test_a_sound_adapter_gets_its_passport_and_its_object(base, files, tmp_path):
    validated = Validator(LIMITS).check([base], *files, tmp_path / "object")
    data = (tmp_path / "object").read_bytes()
    assert (validated.digest, validated.size_bytes) == (sha256(data), len(data))
    here = asdict(validate_adapter(files[0].read_bytes(), files[1], base, LIMITS))
    assert validated.passport | {"seconds": None} == here | {"seconds": None}
    assert validated.passport["seconds"].keys() == {"check", "write"}


def test_a_dry_run_names_the_digest_and_writes_nothing(base, files, tmp_path):
    validator = Validator(LIMITS)
    written = validator.check([base], *files, tmp_path / "object")
    dry = validator.check([base], *files)
    assert (dry.digest, dry.size_bytes) == (written.digest, written.size_bytes)


def test_a_refusal_comes_through_with_its_code_and_its_key(base, files):
    files[0].write_bytes(make_config(use_dora=True))
    with refused("unsupported_feature", match="use_dora", param="use_dora"):
        Validator(LIMITS).check([base], *files)


def test_the_process_knows_a_mixture_of_experts(base, files):
    mixture = replace(base, config=base.config | {"architectures": ["Qwen3MoeForCausalLM"]})
    name = "base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight"
    files[1].write_bytes(encode({name: make_tensor(np.ones((1, 4)))}))
    with pytest.raises(InvalidAdapter, match="LoRA on experts") as caught:
        Validator(LIMITS).check([mixture], *files)
    assert name in str(caught.value)


def test_the_process_chooses_among_base_models_and_names_its_choice(base, files, tmp_path):
    small = make_base(tmp_path / "small", "small", num_layers=1)
    assert Validator(LIMITS).check([small, base], *files).base_model == base.model_id
    twin = replace(base, model_id="twin", base_revision="f" * 64)
    with refused("base_model_unclear", match="tiny-llama, twin", param="base_model"):
        Validator(LIMITS).check([base, twin], *files)


def test_a_tokenizer_is_compared_with_that_of_the_base_model_that_is_chosen(files, tmp_path):
    small = make_base(tmp_path / "small", "small", num_layers=1)
    large = make_base(tmp_path / "large", "large")
    make_tokenizer("llama3").save(str(small.path / TOKENIZER))
    make_tokenizer("qwen2").save(str(large.path / TOKENIZER))
    large = replace(large, config=large.config | {"vocab_size": 4096})
    config = {"chat_template": "x", "eos_token": "<|eot_id|>"}
    (large.path / TOKENIZER_CONFIG).write_text(json.dumps(config))
    given = {name: tmp_path / name for name in (TOKENIZER, CHAT_TEMPLATE)}
    tokenizer = make_tokenizer("qwen2")
    tokenizer.add_special_tokens(["<new>"])
    tokenizer.save(str(given[TOKENIZER]))
    given[CHAT_TEMPLATE].write_text("y")
    check = functools.partial(Validator(LIMITS).check, [small, large], *files)
    validated = check(tokenizer=given)
    own = json.loads(validated.tokenizer)
    assert own["chat_template"] == "y"
    assert [token["content"] for token in own["added_tokens"]] == ["<new>"]
    assert validated.passport["tokenizer"] == {
        "added_tokens": 1, "has_chat_template": True, "eos_token_ids": [],
    }  # fmt: skip
    given[CHAT_TEMPLATE].write_text("x")
    assert check(tokenizer={CHAT_TEMPLATE: given[CHAT_TEMPLATE]}).tokenizer is None
    make_tokenizer("llama3").save(str(given[TOKENIZER]))
    with refused("tokenizer_mismatch", match="token .* has"):
        check(tokenizer=given)


def test_a_process_that_names_a_base_model_that_was_not_asked_about_is_not_believed(
    base, files, tmp_path
):
    answer = {"passport": {}, "digest": "d", "size_bytes": 1, "is_offline": True}
    answer["base_model"] = "another"
    python = pretender(tmp_path, f"{READY}; echo '{json.dumps(answer)}'")
    with refused("validator_failed"):
        Validator(LIMITS, python=python).check([base], *files)


def test_too_large_comes_through_with_its_sizes(base, files):
    with pytest.raises(TooLarge) as caught:
        Validator(AdapterLimits(max_adapter_bytes=100)).check([base], *files)
    size_bytes = files[1].stat().st_size
    assert f"is {size_bytes} bytes; the limit is 100." in str(caught.value)


def test_a_config_over_its_limit_starts_no_process(base, files, tmp_path):
    files[0].write_bytes(b" " * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(TooLarge, match=CONFIG_FILE):
        Validator(LIMITS, python="/no/such/python").check([base], *files)


def test_the_process_is_given_no_secrets(base, files, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    seen = tmp_path / "seen"
    python = pretender(tmp_path, f"/usr/bin/env > {seen}; pwd >> {seen}")
    with refused("validator_unavailable"):
        Validator(LIMITS, python=python).check([base], *files)
    names = {line.partition("=")[0] for line in seen.read_text().splitlines()}
    shells_own = {"PWD", "_", "SHLVL", "OLDPWD"}
    threads = {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"}
    assert names - shells_own - {"LD_LIBRARY_PATH"} == threads | {"/"}


def in_a_validator(code):
    """Output of a process that gives up its privileges as a validator does and then runs `code`."""
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    start += "import registry.checks.validator_process as v"
    confine = "v.begin(memory_bytes=1 << 30, file_bytes=1000, cpu_s=7, open_files=9, niceness=3)"
    command = [sys.executable, "-I", "-c", f"{start}\noffline = {confine}\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_it_gives_up_what_it_does_not_need():
    names = ("AS", "FSIZE", "CPU", "NOFILE", "CORE")
    limits = ", ".join(f"resource.getrlimit(resource.RLIMIT_{name})" for name in names)
    said = in_a_validator(f"import os, resource; print([{limits}], os.nice(0) >= 3)")
    values = [1 << 30, 1000, 7, 9, 0]
    assert said == f"{[(value, value) for value in values]} True\n"


def test_it_takes_no_more_memory_than_it_may():
    assert "MemoryError" in in_a_validator("bytearray(1 << 30)")


def test_it_reaches_no_network_where_the_system_can_keep_it_away():
    code = "import socket\nif not offline: raise SystemExit('as before')\n"
    said = in_a_validator(code + "socket.create_connection(('127.0.0.1', 1), 1)")
    assert "as before" in said or "Network is unreachable" in said


def test_a_system_that_cannot_keep_it_off_the_network_is_told_of(base, files, tmp_path, caplog):
    answer = {"passport": {}, "digest": "d", "size_bytes": 1, "is_offline": False}
    answer["base_model"] = base.model_id
    script = f"echo ready; echo '{json.dumps(answer)}'"
    validated = Validator(LIMITS, python=pretender(tmp_path, script)).check([base], *files)
    assert not validated.is_offline
    assert "network" in caplog.text


def test_it_imports_no_model_library_and_no_database():
    said = in_a_validator("print(*sys.modules)")
    heavy = {"torch", "transformers", "peft", "safetensors", "sqlalchemy", "boto3", "fastapi"}
    assert not heavy & set(said.split())
    assert "numpy" in said.split()


READY = "echo ready"


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (f"{READY}; kill -9 $$", "validator_failed"),
        (f"{READY}; kill -XCPU $$", "validator_timeout"),
        (f"{READY}; exit 1", "validator_failed"),
        (f"{READY}; echo '{{}}'; exit 1", "validator_failed"),
        (f"{READY}; echo nonsense", "validator_failed"),
        (f"{READY}; head -c 200000 /dev/zero", "validator_failed"),
        (f"{READY}; exec sleep 60", "validator_timeout"),
    ],
)
def test_a_process_that_breaks_over_the_files_refuses_them(base, files, tmp_path, script, code):
    limits = ValidatorLimits(base_s=0.5, wall_ratio=1, max_answer_bytes=100_000)
    validator = Validator(LIMITS, limits, pretender(tmp_path, script))
    with refused(code, match="again"):
        validator.check([base], *files)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 1", "did not start"),
        ("exec sleep 60", "too long to start"),
        (READY + """; echo '{"unavailable": "the disk is full"}'""", "the disk is full"),
    ],
)
def test_a_process_that_cannot_do_its_work_is_not_the_files_fault(
    base, files, tmp_path, script, reason
):
    limits = ValidatorLimits(base_s=0.5, wall_ratio=1)
    with refused("validator_unavailable") as caught:
        Validator(LIMITS, limits, pretender(tmp_path, script)).check([base], *files)
    assert reason in caught.value.__notes__[0]


def test_an_interpreter_that_is_not_there_is_not_the_files_fault(base, files):
    with refused("validator_unavailable"):
        Validator(LIMITS, python="/no/such/python").check([base], *files)


def test_a_full_disk_is_not_the_files_fault(base, files):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with refused("validator_unavailable", match="later") as caught:
        Validator(LIMITS).check([base], *files, Path("/dev/full"))
    assert "No space left" in caught.value.__notes__[0]


def test_memory_that_runs_out_refuses_the_file(base, files):
    # The process holds more than the limit already when it takes effect; the header needs more.
    files[1].write_bytes(encode_header(b"{" + b" " * 1_000_000 + b"}"))
    limits = ValidatorLimits(memory_bytes=10 << 20)
    with refused("validator_failed"):
        Validator(LIMITS, limits).check([base], *files)


@pytest.mark.parametrize(
    ("max_wait_s", "reason"), [(0.0, "other uploads are being checked"), (30.0, "No such file")]
)
def test_few_run_at_once_and_another_waits_as_long_as_it_may(
    base, files, tmp_path, max_wait_s, reason
):
    os.mkfifo(tmp_path / "config")
    limits = ValidatorLimits(max_running=1, max_wait_s=max_wait_s)
    check = functools.partial(Validator(LIMITS, limits, "/no/such/python").check, [base])
    with ThreadPoolExecutor() as pool:
        first = pool.submit(check, tmp_path / "config", files[1])
        with (tmp_path / "config").open("wb"):  # blocks until the first, in its turn, reads it
            second = pool.submit(check, *files)
            if not max_wait_s:
                assert second.exception()
    assert "No such file" in first.exception().__notes__[0]
    assert reason in second.exception().__notes__[0]
