"""Real engines as processes, on one machine with one fetcher, as `chorale serve` starts them."""

import contextlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.adapters.tiers import BASE_REVISION, Tiers
from bench.in_process import DEVICE, DTYPE, THREADS, EngineFactory
from bench.product import started
from engine.config import EngineConfig
from engine.wire import write_vocabulary
from server.pool.files import Member

_SOCKET = "engine.sock"


@contextmanager
def engine_processes(
    folder: Path, factory: EngineFactory, tiers: Tiers, count: int, **settings: Any
) -> Iterator[list[Member]]:
    """Start engines. They know no adapter yet, and may still be starting.

    folder: holds all their files; exists and is empty.   settings: fields of EngineConfig.
    """
    vocabulary = folder / "vocabulary"
    write_vocabulary(vocabulary, [b"%d " % token for token in range(factory.vocab_size)])
    with contextlib.ExitStack() as stack:
        members = []
        for number in range(1, count + 1):
            name = f"engine-{number}"
            config = EngineConfig(
                data_dir=str(folder / name),
                model_dir=str(factory.model_dir),
                base_revision=BASE_REVISION,
                vocabulary_path=str(vocabulary),
                eos_token_ids=(0,),
                adapter_cache_dir=str(tiers.cache),
                fetcher_socket=str(tiers.socket),
                device=DEVICE,
                dtype=str(DTYPE).removeprefix("torch."),
                threads=THREADS,
                swap_bytes=0,
                speculation="off",  # random models repeat themselves
                **settings,
            )
            (folder / name).mkdir()
            path = folder / f"{name}.json"
            path.write_text(json.dumps(asdict(config)))
            command = (sys.executable, "-m", "engine", str(path))
            environment = {"OMP_NUM_THREADS": str(THREADS)}
            stack.enter_context(started(command, folder / f"{name}.log", environment))
            members.append(Member(name=name, address=f"ipc://{folder / name / _SOCKET}"))
        yield members
