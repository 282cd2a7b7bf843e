"""`python -m engine.rank_process CONFIG INDEX STEPS PLACEMENTS` runs a rank other than the first.

The process computes the steps that the first rank sends, and reads its shards of adapters into the
slabs that the first rank names. It decides nothing, and ends when the first rank ends.

STEPS, PLACEMENTS: file descriptors of its ends of two channels; see engine.ranks.group.
"""

import json
import logging
import os
import queue
import signal
import sys
import threading
from dataclasses import astuple
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from engine.build import build_rank
from engine.config import EngineConfig
from engine.errors import UnsupportedModel
from engine.models.ranks import TorchRanks
from engine.ranks.batch_row import decode
from engine.ranks.channel import Channel, ChannelClosed
from lora import log_lines
from lora.batch import DeviceTables
from lora.disk_cache import packed_path
from lora.errors import AdapterError, Failure
from lora.filling import SlabFiller
from lora.shard import Shard

logger = logging.getLogger(__name__)


class PlacedAdapters:
    """Adapters in this rank's arena, by the numbers of their placements.

    An adapter is forgotten when another placement takes one of its slabs, so there are never more
    adapters than slabs.
    """

    def __init__(self, filler: SlabFiller, cache_dir: Path) -> None:
        self._filler = filler
        self._cache_dir = cache_dir
        self._tables: dict[str, DeviceTables] = {}
        self._owners: dict[int, str] = {}

    def tables(self, key: str) -> tuple[int, DeviceTables]:
        """See engine.steps.segments.Tables: key and generation are the number of the placement."""
        return int(key), self._tables[key]

    def place(self, number: int, digest: str, slabs: list[int]) -> Failure | None:
        """Read an adapter's shard into `slabs`; return why that failed, or None."""
        for slab in slabs:
            self._tables.pop(self._owners.pop(slab, ""), None)
        path = packed_path(self._cache_dir, digest, self._filler.form.form_id)
        try:
            packed = self._filler.read(path, digest)
            try:
                os.utime(path)  # the fetcher evicts the least recently used files first
                tables = self._filler.fill(packed, slabs)
            finally:
                self._filler.release(packed)
        except FileNotFoundError:
            return Failure("evicted", "another rank found its packed file gone")
        except AdapterError as error:
            logger.warning("%s", error)
            return Failure("lost", "another rank found its packed file damaged")
        except (OSError, MemoryError, RuntimeError) as error:
            # torch raises RuntimeError when there is no memory.
            logger.warning("%s", error)
            return Failure("unavailable", "another rank could not read its packed file")
        self._owners |= dict.fromkeys(slabs, str(number))
        self._tables[str(number)] = tables
        return None


def main() -> None:
    config_path, index = Path(sys.argv[1]), int(sys.argv[2])
    steps, placements = (Channel(Connection(int(end))) for end in sys.argv[3:5])
    # The path is DATA_DIR/ranks/config.json, and the folder has the engine's name.
    log_lines.begin("engine", engine=config_path.parents[1].name, rank=index)
    # Only the first rank reacts to them: until its requests have ended, it needs this rank.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(placements, orders), daemon=True).start()
    config = EngineConfig(**json.loads(config_path.read_text()))
    torch.set_num_threads(config.threads)
    shard = Shard(index, config.tensor_parallel_size)
    try:
        ranks = TorchRanks(shard, config_path.parent / "store", config.device)
        filler, make_runner = build_rank(config, ranks)
    except UnsupportedModel as error:
        logger.error("%s", error)
        sys.exit(os.EX_CONFIG)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        logger.exception("the rank cannot be started: %s: %s", type(error).__name__, error)
        sys.exit(os.EX_DATAERR)
    adapters = PlacedAdapters(filler, Path(config.adapter_cache_dir))
    threading.Thread(target=_place, args=(adapters, orders, placements), daemon=True).start()
    runner = make_runner(adapters.tables)
    num_under_way = 0
    while True:
        try:
            step = steps.receive()
        except ChannelClosed:
            os._exit(os.EX_OK)
        runner.launch(decode(step))
        num_under_way += 1
        if num_under_way > runner.lag:
            runner.collect()
            num_under_way -= 1


def _receive(placements: Channel, orders: "queue.SimpleQueue[Any]") -> None:
    """Queue placements. End this process, whatever it is doing, when the first rank ends."""
    while True:
        try:
            orders.put(placements.receive())
        except ChannelClosed:
            os._exit(os.EX_OK)


def _place(adapters: PlacedAdapters, orders: "queue.SimpleQueue[Any]", placements: Channel) -> None:
    """Place adapters in a thread beside the steps, so that no request waits for another's load."""
    while True:
        number, digest, slabs = orders.get()
        try:
            failure = adapters.place(number, digest, slabs)
            placements.send((number, failure and astuple(failure)))
        except BaseException:
            logger.exception("placing an adapter failed: exiting")
            os._exit(os.EX_SOFTWARE)


if __name__ == "__main__":
    main()
