"""`python -m engine.retired CONFIG.json` serves the journal of an engine that is gone for good.

Opening the journal ends the requests that were open. The process runs in the engine's folder, on
its socket and under its id, so that gateways see that engine, leaving, and settle its journal. It
exits 0 when all records are posted and no hold can be open any more, and then marks the folder
(`engine.leaving.is_settled`). It needs neither torch nor a model.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engine.config import EngineConfig
from engine.core import Busy
from engine.journal.journal import Journal
from engine.journal.lines import JournalCorrupt
from engine.leaving import Leaving, mark_settled
from engine.process import Core, EngineProcess, engine_identity, lock_directory, welcome_of
from engine.wire.messages import EngineStats, ReadJournal
from engine.wire.records import JournalRecords
from lora import log_lines
from lora.beat import Beat

logger = logging.getLogger(__name__)

VOIDING_S = 15.0
"""Time for gateways to void expired holds, which they look for every five seconds."""
_READING_S = 600.0


class RetiredCore(Core):
    """A journal without an engine; see engine.process.Core.

    holds_end_s: seconds until gateways have voided every expired hold on this engine. A gateway
    that died between its hold and its request left a hold of which no journal says anything: it is
    voided when it has expired and a gateway has read the whole journal after that.
    """

    num_steps = 0
    has_work = is_settled = False

    def __init__(
        self, journal: Journal, holds_end_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.journal = journal
        self._clock = clock
        self._holds_end_at = clock() + holds_end_s

    def step(self, busy: Busy) -> list[tuple[str, JournalRecords]]:
        self.journal.make_room()
        return []

    def handle(self, gateway_id: str, message: object) -> list[tuple[str, JournalRecords]]:
        if not isinstance(message, ReadJournal):
            return []
        answer = self.journal.answer(message)
        if message.engine_id == self.journal.engine_id:
            self.is_settled = self.journal.is_settled and self._clock() >= self._holds_end_at
        return [(gateway_id, answer)]

    def close(self) -> None:
        self.journal.close()

    def take_stats(self) -> EngineStats:
        return EngineStats(unsettled_records=self.journal.num_unsettled)


class Retirement(Leaving):
    """A leaving that begins at once; it lasts until all is settled, however long that takes."""

    def __init__(self) -> None:
        super().__init__(timeout_s=float("inf"))
        super().begin()
        self._is_asked_to_stop = False

    def begin(self) -> None:
        """Stop when asked to; the next process in this folder continues."""
        self._is_asked_to_stop = True

    @property
    def refuses(self) -> bool:
        return True

    def is_over(self, *, has_gateways: bool, is_settled: bool) -> bool:
        return is_settled or self._is_asked_to_stop


def main() -> None:
    log_lines.begin("retired", engine=Path(sys.argv[1]).stem)
    config = EngineConfig(**json.loads(Path(sys.argv[1]).read_text()))
    data_dir = Path(config.data_dir)
    with lock_directory(data_dir):
        engine_id, epoch = engine_identity(data_dir)
        beat, folder = Beat.inherited(), data_dir / "journal"
        try:
            with beat.busy("reading the journal", _READING_S):
                journal = Journal(
                    folder, engine_id, config.base_revision, damaged=config.damaged_journal
                )
        except JournalCorrupt as error:
            logger.error("%s. Its usage cannot be billed; see %s", error, data_dir)
            sys.exit(os.EX_DATAERR)
        core = RetiredCore(journal, config.hold_lifetime_s + VOIDING_S)
        welcome = replace(welcome_of(config, engine_id, epoch), device="none", dtype="none")
        EngineProcess(core, welcome, config, Retirement(), beat).run()
        if core.is_settled:
            logger.info("all of %s is settled", engine_id)
            mark_settled(data_dir)


if __name__ == "__main__":
    main()
