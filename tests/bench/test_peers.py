"""Another system's row says whether its answers came from the right adapters."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bench.checkpoint import Checkpoint
from bench.outcome import Outcome
from bench.peers.measure import BurstMeasurement
from bench.peers.peer import Setting
from bench.peft_generate import PeftPeer
from bench.workload import BenchRequest

BURST = BurstMeasurement(
    stack="tiny", requests=7, prompt_tokens="3:33", output_tokens="2", adapters=(0, 16), repeats=3
)


class FakePeer:
    """A peer that runs PEFT in this process; it may drop its adapters."""

    system = "fake"
    precisions = ("float32",)

    def __init__(self, drops: bool) -> None:
        self._drops = drops

    def missing(self) -> str | None:
        return None

    @contextmanager
    def serving(self, setting: Setting) -> Iterator["FakeServer"]:
        yield FakeServer(setting.checkpoint, self._drops)


class FakeServer:
    version = "fake 1"

    def __init__(self, checkpoint: Checkpoint, drops: bool) -> None:
        self.pid = os.getpid()
        self._peer = PeftPeer(checkpoint)
        self._instead = {"model": checkpoint.base_model} if drops else {}

    def serve(self, requests: Sequence[BenchRequest]) -> list[Outcome]:
        return self._peer.run([replace(r, **self._instead) for r in requests])


@pytest.mark.parametrize("drops", [False, True])
def test_a_peer_that_drops_adapters_has_no_valid_row_for_them(tmp_path: Path, drops: bool) -> None:
    rows = list(BURST.bench(tmp_path).rows(FakePeer(drops)))
    asked = [(bench, setup["adapters"], setup["requests"]) for bench, setup, _ in rows]
    assert asked == [("peers.single", 0, 1), ("peers", 0, 7), ("peers", 16, 7)]
    _, base, mixed = (result for _, _, result in rows)
    assert base["valid"]
    assert mixed["valid"] is not drops
    assert (mixed["first_token_match"] < mixed["adapters_matter"]) is drops
