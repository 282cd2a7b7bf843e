import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load, save_file

from server.client.files import CONFIG_FILE, WEIGHTS_FILE
from tests.server.fake_api import is_one_line
from tests.server.fake_uploads import FakeUploads, make_adapter, refusal


@pytest.fixture
def server():
    return FakeUploads(part_bytes=16 << 20)


@pytest.fixture
def api(make_api, server):
    return make_api(server)


@pytest.fixture
def run(run):
    return lambda *arguments: run("adapters", *arguments)


@pytest.fixture
def folder(tmp_path):
    """A folder with three adapters, a file, and a folder that is no adapter."""
    folder = tmp_path / "all"
    folder.mkdir()
    for name in ("alpha", "beta", "gamma"):
        make_adapter(folder / name, name.encode())
    (folder / "notes.txt").write_text("")
    (folder / "drafts").mkdir()
    return folder


def refuse_for(name):
    """A completion that fails for this adapter only."""

    def complete(server, request):
        upload = server.uploads[request.url.path.split("/")[3]]
        if upload["adapter"] != name:
            return None
        fault = {"code": "not_finite", "param": None, "message": "A tensor has a NaN."}
        upload |= {"state": "failed", "error": fault}
        return refusal(400, "not_finite", fault["message"])

    return complete


# ---- push and validate ----


def test_a_push_shows_the_passport(run, folder):
    result = run("push", str(folder / "alpha"), "--name", "mine", "--alias", "prod")
    assert result.exit_code == 0
    assert is_one_line(result.stderr, "mine@1 is published.")
    assert "2.5 MB" in result.stdout
    assert "2 added tokens, a chat template, ends at 9" in " ".join(result.stdout.split())


@pytest.mark.parametrize("command", [("push", "--name", "mine"), ("validate",)])
def test_a_trainers_folder_is_sent_without_what_else_is_in_it(run, tmp_path, server, command):
    folder = tmp_path / "out" / "sales [v2]"
    folder.parent.mkdir()
    make_adapter(folder)
    (folder / "optimizer.pt").write_bytes(b"o")
    result = run(command[0], f"{folder.parent}/", *command[1:], "--json")
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        f"The adapter is in {folder}.",
        "Left out: training state (optimizer.pt).",
    ]
    assert server.uploads["up_0"]["files"].keys() == {CONFIG_FILE, WEIGHTS_FILE}


def test_a_push_of_shards_that_was_interrupted_is_continued(run, tmp_path, server):
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / CONFIG_FILE).write_bytes(b"{}")
    for number in (1, 2):
        tensors = {f"t{number}": np.full(9, number, np.float32)}
        save_file(tensors, folder / f"adapter_model-0000{number}-of-00002.safetensors")
    server.completions = [lambda *_: refusal(403, "tenant_suspended", "Suspended.")]
    assert run("push", str(folder), "--name", "mine").exit_code == 1
    server.log.clear()
    assert run("push", str(folder), "--name", "mine").exit_code == 0
    assert len(server.uploads) == 1
    assert server.num_calls("PUT", "") == 0
    [sent] = server.uploads["up_0"]["content"][WEIGHTS_FILE].values()
    assert load(sent).keys() == {"t1", "t2"}


def test_a_push_may_name_the_format_of_calls_or_describe_it_in_a_file(
    run, folder, server, tmp_path
):
    described, broken = tmp_path / "format.json", tmp_path / "broken.json"
    described.write_text('{"start_anchor": "x"}')
    broken.write_text("{")
    for given, sent in [("hermes", "hermes"), (str(described), {"start_anchor": "x"})]:
        asked = ("push", str(folder / "alpha"), "--name", "mine", "--response-template", given)
        assert run(*asked).exit_code == 0
        *_, created = server.uploads.values()
        assert created["response_template"] == sent
    result = run("push", str(folder / "beta"), "--name", "b", "--response-template", str(broken))
    assert is_one_line(result.stderr, "is not JSON.")


@pytest.mark.parametrize("command", ["push", "validate", "prove"])
def test_a_base_model_that_is_named_is_sent(run, folder, server, command):
    given = {
        "push": (str(folder / "alpha"), "--name", "mine"),
        "validate": (str(folder / "alpha"),),
        "prove": ("mine", "1"),
    }
    for named in ((), ("--base-model", "org/base")):
        result = run(command, *given[command], *named)
        assert result.exit_code == 0, result.stderr
        *_, created = server.uploads.values()
        assert created["base_model"] == (named[1] if named else "base")


def test_a_push_of_what_is_there_says_so(run, folder, server):
    server.known.add("mine")
    result = run("push", str(folder / "alpha"), "--name", "mine")
    assert is_one_line(result.stderr, "mine@1 was there already.")


@pytest.mark.parametrize("command", [("push", "--name", "mine"), ("validate",)])
def test_what_was_uploaded_is_also_json_and_nothing_else(run, folder, command):
    result = run(command[0], str(folder / "alpha"), *command[1:], "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout)["state"] == "complete"


@pytest.mark.parametrize("command", [("push", "--name", "mine"), ("validate",)])
def test_a_refused_adapter_is_one_line_and_its_report_is_json(run, folder, server, command):
    server.completions = [refuse_for(None), refuse_for(None)]
    if command[0] == "push":
        server.completions = [refuse_for("mine"), refuse_for("mine")]
    result = run(command[0], str(folder / "alpha"), *command[1:])
    assert (result.exit_code, result.stdout) == (1, "")
    sentence = "Error: The adapter is refused (not_finite): A tensor has a NaN."
    assert is_one_line(result.stderr, sentence)
    result = run(command[0], str(folder / "alpha"), *command[1:], "--json")
    assert result.exit_code == 1
    assert is_one_line(result.stderr, sentence)
    assert json.loads(result.stdout)["error"]["code"] == "not_finite"


def test_a_dry_run_shows_the_passport_and_makes_nothing(run, folder, server):
    result = run("validate", str(folder / "alpha"))
    assert result.exit_code == 0
    assert is_one_line(result.stderr, "an adapter of the base model base. Nothing was kept.")
    assert "passport" in result.stdout
    assert [upload["adapter"] for upload in server.uploads.values()] == [None]


def test_a_version_for_another_base_is_proved_again_and_nothing_is_sent(run, server):
    result = run("prove", "mine", "3", "--alias", "prod")
    assert result.exit_code == 0
    assert is_one_line(result.stderr, "mine@1 is published.")
    assert [method for method, _ in server.log] == ["POST", "POST"]
    assert server.log[0][1] == "/v1/adapters/mine/versions/3/prove"
    assert next(iter(server.uploads.values()))["alias"] == "prod"
    server.completions = [refuse_for("other"), refuse_for("other")]
    result = run("prove", "other", "1")
    assert (result.exit_code, result.stdout) == (1, "")


def test_a_direct_push_sends_no_bytes_through_the_gateway(run, folder, server, make_api):
    store = make_api(server.store)
    server.store_url = store.url
    result = run("push", str(folder / "alpha"), "--name", "mine", "--direct")
    assert result.exit_code == 0
    assert len(store.requests) == 2
    assert server.num_calls("PUT", "") == 0


@pytest.mark.parametrize(
    ("arguments", "exit_code", "sentence"),
    [
        (("nowhere",), 2, "nowhere is no folder, and no hub id"),
        (("all/drafts",), 1, f"has no {CONFIG_FILE}"),
        (("all/alpha", "--revision", "v1"), 2, "--revision is of a hub's repository"),
        (("all/pickled",), 1, "all/pickled: adapter_model.bin is damaged"),
        (("all",), 1, "all has 3 adapters: alpha, beta, gamma. Push one: chorale adapters push"),
        (("all/alpha", "--response-template", "my.json"), 2, "my.json: No such file or directory"),
        (("all/alpha", "--response-template", "./my"), 2, "my: No such file or directory"),
    ],
)
def test_what_cannot_be_pushed_is_one_line_and_asks_nobody(
    run, folder, api, arguments, exit_code, sentence
):
    if "all/pickled" in arguments:
        path = make_adapter(folder / "pickled") / WEIGHTS_FILE
        path.rename(path.with_name("adapter_model.bin"))
    result = run("push", *arguments, "--name", "mine")
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert is_one_line(result.stderr, "Error: ", sentence)
    assert api.requests == []


# ---- import ----


def outcomes(result):
    return {row["name"]: (row["version"], row["outcome"]) for row in json.loads(result.stdout)}


def test_every_adapter_of_a_folder_is_imported_under_its_own_name(run, folder, server):
    result = run("import", str(folder), "--alias", "prod")
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows == [
        ["name", "version", "outcome"],
        ["alpha", "1", "published"],
        ["beta", "1", "published"],
        ["gamma", "1", "published"],
    ]
    assert {upload["alias"] for upload in server.uploads.values()} == {"prod"}


def test_an_import_goes_on_after_one_that_failed_and_ends_with_exit_1(run, folder, server):
    server.completions = [refuse_for("beta")] * 3
    result = run("import", str(folder), "--json")
    assert result.exit_code == 1
    assert is_one_line(result.stderr, "Error: 1 of 3 adapters were not imported.")
    assert outcomes(result) == {
        "alpha": (1, "published"),
        "beta": (None, "The adapter is refused (not_finite): A tensor has a NaN."),
        "gamma": (1, "published"),
    }
    assert [row["code"] for row in json.loads(result.stdout)] == [None, "not_finite", None]


def test_an_import_goes_on_after_one_that_is_not_whole(run, folder):
    (folder / "alpha" / WEIGHTS_FILE).unlink()
    result = run("import", str(folder), "--json")
    assert result.exit_code == 1
    found = outcomes(result)
    assert "has no adapter_model.safetensors" in found["alpha"][1]
    assert [found[name] for name in ("beta", "gamma")] == [(1, "published")] * 2


def test_an_import_run_again_sends_only_what_is_missing(run, folder, server):
    server.completions = [
        None,
        lambda *_: refusal(403, "tenant_suspended", "Suspended."),
    ]
    first = run("import", str(folder), "--json")
    assert outcomes(first) == {
        "alpha": (1, "published"),
        "beta": (None, "Suspended."),
        "gamma": (None, "not tried"),
    }
    server.known.add("alpha")
    server.log.clear()
    again = run("import", str(folder), "--json")
    assert again.exit_code == 0
    assert outcomes(again)["alpha"] == (1, "was there already")
    assert outcomes(again)["beta"] == outcomes(again)["gamma"] == (1, "published")
    assert server.num_calls("POST", "beta/uploads") == 0, "beta's open upload is continued"
    assert server.num_calls("PUT", "") == 2, "both files of gamma"


def test_folders_that_are_no_names_are_imported_under_names_made_of_theirs(run, folder, server):
    for name in ("Llama SQL_v2", "Alpha", "日本", "alpha!", "-x"):
        make_adapter(folder / name, name.encode())
    result = run("import", str(folder), "--json")
    assert result.exit_code == 1
    assert is_one_line(result.stderr, "Error: 3 of 8 adapters were not imported.")
    rows = {row["folder"]: row for row in json.loads(result.stdout)}
    names = {row["name"] for row in rows.values() if row["version"]}
    assert names == {"alpha", "beta", "gamma", "llama-sql_v2", "x"}
    assert rows["Llama SQL_v2"]["name"] == "llama-sql_v2"
    push = "chorale adapters push"
    assert rows["Alpha"]["outcome"] == f"alpha is taken: {push} {folder}/Alpha --name NAME"
    assert rows["alpha!"]["outcome"] == f"alpha is taken: {push} '{folder}/alpha!' --name NAME"
    assert rows["日本"]["outcome"].startswith(f"no name can be made of it: {push} ")
    assert {upload["adapter"] for upload in server.uploads.values()} == names
    shutil.rmtree(folder / "日本")
    told = run("import", str(folder)).stdout.splitlines()
    assert told[0].split() == ["folder", "name", "version", "outcome"]
    assert [line.split()[:4] for line in told[1:5:3]] == [
        ["alpha", "alpha", "1", "published"],
        ["-x", "x", "1", "published"],
    ]


def test_an_import_takes_what_trainers_wrote_and_says_of_which_it_cannot_choose(run, tmp_path):
    folder = tmp_path / "runs"
    one, several = folder / "one", folder / "several"
    for path in (one / "checkpoint-5", several / "checkpoint-5", several / "checkpoint-10"):
        path.parent.mkdir(parents=True, exist_ok=True)
        make_adapter(path)
    result = run("import", str(folder), "--json")
    found = outcomes(result)
    assert found["one"] == (1, "published")
    assert "several has 2 adapters: checkpoint-5, checkpoint-10. Push" in found["several"][1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("nowhere",), "nowhere: No such file or directory"),
        (("all/drafts",), "has no folders with adapters"),
        (("all", "--alias", "3rd"), "alias '3rd' is not allowed"),
    ],
)
def test_an_import_of_nothing_is_a_wrong_call(run, folder, api, arguments, sentence):
    result = run("import", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert is_one_line(result.stderr, sentence)
    assert api.requests == []
