"""The benchmark of other systems, without them: requests, answers, failures, rows and plots."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bench.checkpoint import Checkpoint, make_checkpoint
from bench.first_tokens import FirstTokens
from bench.multi_lora import Burst
from bench.outcome import Outcome
from bench.peers.__main__ import parse_options, run
from bench.peers.gguf_files import convert_adapter, convert_model
from bench.peers.llama_cpp import LlamaServer, token_ids_of
from bench.peers.measure import Plan, measure
from bench.peers.openvino_peer import OpenVINO
from bench.peers.peer import PeerFailed, Setting
from bench.peers.rows import put_row
from bench.peers.transformers_peft import TransformersPeft
from bench.peers.worker import working
from bench.peft_generate import PeftPeer
from bench.workload import BenchRequest, Lengths

BURST = Burst(
    stack="tiny", num_requests=7, prompt_tokens=Lengths(3, 33), output_tokens=Lengths(2, 2)
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint("tiny", tmp_path_factory.mktemp("bench"), num_adapters=16)


@pytest.fixture
def setting(checkpoint: Checkpoint, tmp_path: Path) -> Setting:
    return Setting(checkpoint=checkpoint, precision="float32", threads=1, folder=tmp_path)


class FakePeer:
    """A peer that runs PEFT in this process; it may drop its adapters, or fail to start."""

    system = "fake"
    precisions = ("float32",)
    co_batched = True

    def __init__(self, drops: bool = False, fails: bool = False) -> None:
        self._drops = drops
        self._fails = fails

    def missing(self) -> str | None:
        return None

    @contextmanager
    def serving(self, setting: Setting) -> Iterator["FakeServer"]:
        if self._fails:
            raise PeerFailed("no")
        yield FakeServer(setting.checkpoint, self._drops)


class FakeServer:
    version = "fake 1"

    def __init__(self, checkpoint: Checkpoint, drops: bool) -> None:
        self.pid = os.getpid()
        self._peer = PeftPeer(checkpoint, threads=1)
        self._instead = {"model": checkpoint.base_model} if drops else {}

    def serve(self, requests: Sequence[BenchRequest]) -> list[Outcome]:
        return self._peer.run([replace(r, **self._instead) for r in requests], max_batch=7)


def rows_of(
    peer: FakePeer, checkpoint: Checkpoint, folder: Path, *counts: int, precisions=None
) -> list:
    plan = Plan(
        burst=BURST,
        checkpoint=checkpoint,
        first_tokens=FirstTokens(checkpoint, threads=1),
        num_adapters=counts,
        threads=[1],
        repeats=3,
        folder=folder,
        precisions=precisions,
    )
    return list(measure(peer, plan))


def test_a_peer_is_measured_alone_and_with_every_number_of_adapters(checkpoint, tmp_path) -> None:
    rows = rows_of(FakePeer(), checkpoint, tmp_path, 0, 16)
    asked = [(bench, setup["adapters"], setup["requests"]) for bench, setup, _ in rows]
    assert asked == [("peers.single", 0, 1), ("peers", 0, 7), ("peers", 16, 7)]
    assert all(result["valid"] for _, _, result in rows)
    assert all(len(result["runs"]) == 3 for _, _, result in rows)
    assert rows[0][1]["prompt_tokens"] == "200"


def test_only_weights_of_the_wanted_form_are_measured(checkpoint, tmp_path) -> None:
    assert rows_of(FakePeer(), checkpoint, tmp_path, 16, precisions=["int4"]) == []
    assert len(rows_of(FakePeer(), checkpoint, tmp_path, 16, precisions=["float32", "int4"])) == 1


def test_a_peer_that_drops_adapters_has_no_valid_row(checkpoint, tmp_path) -> None:
    (_, _, base), (_, _, mixed) = rows_of(FakePeer(drops=True), checkpoint, tmp_path, 0, 16)[1:]
    assert base["valid"]
    assert not mixed["valid"]
    assert mixed["first_token_match"] < mixed["adapters_matter"]


def test_a_peer_that_fails_is_a_row_that_says_why(checkpoint, tmp_path) -> None:
    ((bench, setup, result),) = rows_of(FakePeer(fails=True), checkpoint, tmp_path, 16)
    assert (bench, setup["system"], result) == ("peers", "fake", {"failed": "no", "valid": False})


def test_peers_that_are_not_given_or_not_installed_are_named(tmp_path) -> None:
    absent = str(tmp_path / "no-python")
    asked = ["--only", "openvino", "--only", "llama"]
    for given, reason in (([], "--openvino PYTHON"), (["--openvino", absent], absent)):
        rows = list(run(parse_options([*asked, *given])))
        skipped = {setup["system"]: result["skipped"] for _, setup, result in rows}
        assert set(skipped) == {"OpenVINO GenAI", "llama.cpp server"}
        assert reason in skipped["OpenVINO GenAI"]
        assert "--llama-server" in skipped["llama.cpp server"]


def test_a_python_without_openvino_is_not_openvino() -> None:
    missing = OpenVINO(sys.executable).missing()
    assert missing is not None
    assert "openvino_genai" in missing


def test_peft_in_a_process_of_its_own_says_what_it_says_here(checkpoint, setting) -> None:
    requests = BURST.requests(checkpoint, 16)
    here = PeftPeer(checkpoint, threads=1).run(requests, max_batch=7)
    with TransformersPeft().serving(setting) as server:
        there = server.serve(requests)
        again = server.serve(requests)
        assert "peft" in server.version
    assert [o.token_ids for o in there] == [o.token_ids for o in here]
    assert [o.token_ids for o in again] == [o.token_ids for o in here]
    assert all(o.error is None and 0 < o.chunk_s[0] < o.end_s for o in there)


_FAKE_WORKER = """
import json, sys
job = json.loads(sys.stdin.readline())
print(json.dumps({"version": " ".join([job["base_model"], job["precision"], *job["adapters"]])}))
sys.stdout.flush()
for line in sys.stdin:
    answers = [
        {"token_ids": r["prompt_token_ids"][:1], "token_s": [0.5]}
        for r in json.loads(line)["requests"]
    ]
    print(json.dumps({"answers": answers}), flush=True)
"""


def test_a_worker_is_told_what_to_load_and_answers_in_the_order_of_requests(setting) -> None:
    requests = BURST.requests(setting.checkpoint, 16)
    fake = (sys.executable, "-c", _FAKE_WORKER)
    with working(fake, setting, setting.checkpoint.model_dir) as worker:
        outcomes = worker.serve(requests)
    assert worker.version.split() == ["tiny", "float32", *setting.checkpoint.adapters]
    assert [o.token_ids for o in outcomes] == [r.prompt_token_ids[:1] for r in requests]
    # The fake worker answers one token, but two were asked for.
    assert {o.error for o in outcomes} == {"wrong_length"}


def test_a_worker_that_dies_says_what_it_logged_last(setting) -> None:
    dying = (sys.executable, "-c", "import sys; sys.exit('out of luck')")
    model_dir = setting.checkpoint.model_dir
    with pytest.raises(PeerFailed, match="out of luck"), working(dying, setting, model_dir):
        pass


def test_a_conversion_that_fails_says_why(setting) -> None:
    adapter = next(iter(setting.checkpoint.adapters.values()))
    with pytest.raises(PeerFailed, match="convert_lora_to_gguf"):
        convert_adapter(setting.folder, setting.checkpoint.model_dir, adapter, setting.folder)


def test_weights_of_4_bits_are_rounded_from_exact_ones(setting) -> None:
    exact, quantizer = setting.folder / "model-f32.gguf", setting.folder / "quantize"
    exact.write_text("exact")
    quantizer.write_text("#!/bin/sh\necho $3 of $(cat $1) > $2\n")
    quantizer.chmod(0o755)
    model_dir = setting.checkpoint.model_dir
    made = convert_model(setting.folder, quantizer, model_dir, "q4_0", setting.folder)
    assert made.read_text() == "q4_0 of exact\n"


def test_every_request_to_llama_cpp_says_the_scale_of_every_adapter(setting) -> None:
    server = LlamaServer(1, "", "http://127.0.0.1:1", setting)
    request = BURST.requests(setting.checkpoint, 16)[3]
    for model, on in ((request.model, {3}), (setting.checkpoint.base_model, set())):
        lora = server.body(replace(request, model=model))["lora"]
        assert [entry["id"] for entry in lora] == list(range(16))
        assert {entry["id"] for entry in lora if entry["scale"] == 1.0} == on
        assert {entry["scale"] for entry in lora} <= {0.0, 1.0}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('data: {"content": "ab", "tokens": [7], "stop": false}', [7]),
        ('data: {"content": "", "stop": true}', []),
        ("", []),
    ],
)
def test_events_of_llama_cpp_carry_their_tokens(line: str, expected: list[int]) -> None:
    assert token_ids_of(line) == expected


def make_row(system: str = "a", adapters: int = 16, speed: float | None = 7.0, **result) -> dict:
    setup = {
        "system": system,
        "precision": "float32",
        "threads": 1,
        "model": "tiny",
        "adapters": adapters,
        "requests": 32,
        "prompt_tokens": "64:256",
        "output_tokens": "64",
        "version": f"{speed}",
    }
    return {
        "bench": "peers",
        "setup": setup,
        "result": {"output_tokens_per_cpu_s": speed, **result},
    }


def make_skipped(system: str) -> dict:
    return {"bench": "peers", "setup": {"system": system}, "result": {"skipped": "--a PATH"}}


def test_a_row_takes_the_place_of_the_one_of_the_same_setup(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    new = make_row("a", 16, speed=9.0)
    for row in (make_row("a", 16), make_row("a", 1), make_row("b", 16), new):
        put_row(path, json.dumps(row) + "\n")
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert kept == [make_row("a", 1), make_row("b", 16), new]


def test_a_skipped_peer_is_kept_until_it_is_measured_and_does_not_undo_it(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    for row in (make_skipped("a"), make_skipped("a"), make_skipped("b")):
        put_row(path, json.dumps(row) + "\n")
    assert len(path.read_text().splitlines()) == 2
    for row in (make_row("a"), make_skipped("a")):
        put_row(path, json.dumps(row) + "\n")
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert kept == [make_skipped("b"), make_row("a")]


def test_only_valid_rows_are_drawn_a_line_for_each_system(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    from bench.peers.plot import draw, lines_of

    rows = [
        make_skipped("c"),
        make_row("a", 32, 5.0),
        make_row("a", 0, 9.0),
        make_row("a", 16, 8.0, valid=False),
        make_row("b", 0, 90.0, valid=True) | {"bench": "engine"},
        make_row("b", 0, 1.0) | {"bench": "peers.single"},
    ]
    lines = {
        name: [(row["setup"]["adapters"], row["result"]["output_tokens_per_cpu_s"]) for row in line]
        for name, line in lines_of(rows).items()
    }
    assert lines == {"b, float32": [(0, 90.0)], "a, float32": [(0, 9.0), (32, 5.0)]}
    drawn = []
    for name in ("first.svg", "second.svg"):
        draw(rows, tmp_path / name)
        drawn.append((tmp_path / name).read_text())
    assert drawn[0] == drawn[1]


def test_rows_of_two_bursts_are_not_drawn_as_one(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    from bench.peers.plot import draw

    other = make_row("b")
    other["setup"]["threads"] = 2
    with pytest.raises(ValueError, match="threads"):
        draw([make_row("a"), other], tmp_path / "peers.svg")
    assert not list(tmp_path.iterdir())
