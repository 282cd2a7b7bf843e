"""`python -m tests.engine.fake_engine CONFIG.json`: the real engine process around a FakeRunner.

The process starts in a third of a second. Adapters load at once; FAKE_STEP_S slows the steps.
FAKE_SILENCE_S is how long it may be silent, in its first steps, too: they compile nothing.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.drafts.speculation import Drafter, Speculation
from engine.journal.journal import Journal
from engine.leaving import Leaving
from engine.process import EngineProcess, engine_identity, lock_directory, welcome_of
from engine.scheduling.scheduler import Scheduler
from engine.steps import times as step_times
from engine.steps.meter import TokenMeter
from engine.wire.encoding import read_vocabulary
from lora.arena import Arena
from lora.beat import SILENCE_S, Beat
from lora.manager import AdapterManager
from tests.engine.fakes import FLAT, LAYOUT, FakeLoader, FakeReference, FakeRunner

POISON = 3
"""A prompt that begins with this token kills the engine, as a bug in a kernel would."""


class SlowRunner(FakeRunner):
    def launch(self, batch):
        time.sleep(float(os.environ.get("FAKE_STEP_S", "0")))
        if any(row.start == 0 and row.token_ids[0] == POISON for row in batch.rows):
            os.abort()
        super().launch(batch)


def main() -> None:
    serve(EngineConfig(**json.loads(Path(sys.argv[1]).read_text())))


def serve(config: EngineConfig, *, drafter: Drafter | None = None, **journal_options: Any) -> None:
    """Serve until every gateway is gone."""
    silence_s = float(os.environ.get("FAKE_SILENCE_S", SILENCE_S))
    step_times.MOST_S = float(os.environ.get("FAKE_SILENCE_S", step_times.MOST_S))
    config = replace(
        config,
        max_num_seqs=config.max_num_seqs or 64,
        max_num_batched_tokens=config.max_num_batched_tokens or 128,
        max_sum_ranks_per_step=1024,
    )
    data_dir = Path(config.data_dir)
    data_dir.mkdir(parents=True, exist_ok=True)
    with lock_directory(data_dir):
        engine_id, epoch = engine_identity(data_dir)
        adapters = AdapterManager(Arena(2048), FakeLoader())
        vocabulary = read_vocabulary(Path(config.vocabulary_path))
        vocabulary += [b"?"] * (256 - len(vocabulary))
        scheduler = Scheduler(
            config.scheduler,
            LAYOUT,
            adapters,
            vocabulary,
            config.eos_token_ids,
            speculation=Speculation(FLAT, drafter) if drafter else None,
        )
        journal = Journal(data_dir / "journal", engine_id, config.base_revision, **journal_options)
        runner = SlowRunner(TokenMeter(data_dir / "meter"))
        core = EngineCore(
            scheduler,
            runner,
            journal,
            FakeReference(),
            max_unsettled=config.max_unsettled_records,
            residency_interval_s=config.residency_interval_s,
        )
        welcome = replace(welcome_of(config, engine_id, epoch), device="fake")
        EngineProcess(
            core, welcome, config, Leaving(config.leave_timeout_s), Beat.inherited(silence_s)
        ).run()


if __name__ == "__main__":
    main()
