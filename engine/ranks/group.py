"""The other ranks of an engine, seen from the first: their processes, their steps, their adapters.

    the first                          another (engine.rank_process)
    engine thread    steps ────────▶   computes each, in order
    adapter-loader   placements ───▶   reads its shard into the same slabs, and answers
    rank-i           waits for its end: then this process ends, too

The other ranks live exactly as long as this process: they end at once when a channel closes.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path

from engine.config import EngineConfig
from engine.grammar.matcher import Mask
from engine.models.ranks import TorchRanks
from engine.ranks.batch_row import encode
from engine.ranks.channel import Channel
from engine.steps.batch import Batch, StepTokens
from engine.steps.runner import Runner
from engine.steps.segments import Tables
from lora.errors import Failure
from lora.shard import Shard

logger = logging.getLogger(__name__)

_PLACE_TIMEOUT_S = 60.0
"""Longest time that a rank may take to read an adapter's shard from the disk."""


class RankGroup:
    """All ranks but this one, which are started with the group.

    config: resolved wherever ranks could resolve it differently.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.size = config.tensor_parallel_size
        self._numbers = count(1)
        folder = Path(config.data_dir) / "ranks"
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run, whose store cannot be reused
        folder.mkdir(mode=0o700)
        path = folder / "config.json"
        # The other ranks need neither the engine's address nor its keys.
        others = replace(config, listen="", server_key="", client_key="")
        path.write_text(json.dumps(asdict(others)))
        self._steps: list[Channel] = []
        self._placements: list[Channel] = []
        for index in range(1, self.size):
            self._start(path, index)
        self.ranks = TorchRanks(Shard(0, self.size), folder / "store", config.device)

    def _start(self, config_path: Path, index: int) -> None:
        steps, their_steps = Channel.pair()
        placements, their_placements = Channel.pair()
        with their_steps, their_placements:
            ends = (their_steps.fileno(), their_placements.fileno())
            command = [sys.executable, "-m", "engine.rank_process", str(config_path), str(index)]
            process = subprocess.Popen([*command, *map(str, ends)], pass_fds=ends)
        self._steps.append(steps)
        self._placements.append(placements)
        threading.Thread(
            target=_end_with, args=(process, index), name=f"rank-{index}", daemon=True
        ).start()

    def send_step(self, step: object) -> None:
        """Send a step to the other ranks, from the engine thread. Raises ChannelClosed."""
        for channel in self._steps:
            channel.send(step)

    # ---- adapter-loader: see lora.loader.OtherRanks ----

    def begin_placing(self, digest: str, slabs: list[int]) -> int:
        number = next(self._numbers)
        for channel in self._placements:
            channel.send((number, digest, slabs))
        return number

    def end_placing(self, number: int) -> Failure | None:
        # A ChannelClosed ends the loader, and with it the engine.
        failure = None
        for channel in self._placements:
            answered, failed = channel.receive(_PLACE_TIMEOUT_S)
            assert answered == number, "ranks have lost count of placements"
            if failed:
                failure = failure or Failure(*failed)
        return failure


class LeadingRunner:
    """The first rank's runner, which has the others compute the same steps. See core.Runner."""

    def __init__(self, runner: Runner, group: RankGroup, tables: Tables) -> None:
        self._runner = runner
        self._group = group
        self._tables = tables
        self.lag, self.meter = runner.lag, runner.meter
        self.copy_bytes_per_s = runner.copy_bytes_per_s

    def launch(self, batch: Batch) -> None:
        self._group.send_step(encode(batch, self._tables))
        self._runner.launch(batch)

    def choose(self, masks: Mapping[int, Sequence[Mask]]) -> None:
        # The other ranks are sent the chosen tokens, on a GPU by the step itself.
        self._runner.choose(masks)

    def collect(self) -> StepTokens:
        return self._runner.collect()


def _end_with(process: "subprocess.Popen[bytes]", index: int) -> None:
    """Exit when a rank has ended, since the engine needs all: its supervisor starts them anew."""
    status = process.wait()
    if status == os.EX_OK:
        return  # its channels were closed: this process is on its way out
    logger.error("rank %d has ended (%d): exiting", index, status)
    # Exit at once, since the engine may be waiting for that rank. What it journaled is written,
    # and the next process ends what was open.
    os._exit(status if status in (os.EX_CONFIG, os.EX_DATAERR) else os.EX_SOFTWARE)
