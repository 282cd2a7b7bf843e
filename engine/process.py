"""The engine's process: one loop between the gateways and the core."""

import fcntl
import logging
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Protocol

from engine.config import EngineConfig
from engine.core import Busy, ToGateway
from engine.gateways import Gateways
from engine.journal.files import JournalGone
from engine.leaving import Leaving, forget_settled, refusal
from engine.wire.messages import (
    LEAVING,
    SILENCE_S,
    AddRequest,
    EngineStats,
    Hello,
    ProveAdapter,
    Residency,
    TenantService,
    Welcome,
)
from lora.beat import Beat
from registry.whole_files import write_whole

logger = logging.getLogger(__name__)

IDLE_POLL_MS = 20
LOADING_POLL_MS = 1
RESTING_POLL_MS = 250
"""How long an engine that has nothing to compute sleeps on its socket. A message wakes it, but a
finished load or a signal does not, so it sleeps less while it has requests, which may wait for a
load, and most when it rests.
"""
STATS_INTERVAL_S = 0.25
RESTING_STATS_INTERVAL_S = 1.0
_REST_AFTER_S = 10.0
"""How long an engine computes nothing and moves no adapter before it rests. Gateways average the
figures of this time one by one.
"""
INTEGRITY_INTERVAL_S = 5.0
_CLOSING_S = 60.0


class EngineInUse(Exception):
    """Another engine runs on this data directory."""


def lock_directory(directory: Path) -> IO[str]:
    """Lock a data directory, which whoever starts engines made, while the returned file is open.

    Raises EngineInUse, JournalGone.
    """
    if not directory.is_dir():
        raise JournalGone(directory / "journal")
    file = (directory / "engine.lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise EngineInUse(f"another engine holds {file.name}") from None
    return file


def engine_identity(directory: Path) -> tuple[str, int]:
    """Return (engine_id, epoch): the id lasts as long as the journal, the epoch counts starts.

    The journal's folder is made before the first identity. Raises JournalGone.
    """
    path, journal = directory / "identity", directory / "journal"
    if path.exists() and not journal.is_dir():
        raise JournalGone(journal)
    journal.mkdir(exist_ok=True)
    engine_id, epoch = path.read_text().split() if path.exists() else (f"eng-{uuid.uuid4()}", 0)
    line = f"{engine_id} {int(epoch) + 1:010d}\n"
    if path.exists():
        # Written in place: an engine must start on a full disk, too, without room for another file.
        with path.open("r+") as file:
            file.write(line)
    else:
        write_whole(path, line.encode())
    forget_settled(directory)
    return engine_id, int(epoch) + 1


def welcome_of(config: EngineConfig, engine_id: str, epoch: int) -> Welcome:
    """The greeting of an engine, as far as its settings tell it.

    A length that is not set depends on the engine's memory. Gateways divide by the number of
    sequences, also until they have heard that an engine takes nothing.
    """
    return Welcome(
        engine_id=engine_id,
        epoch=epoch,
        base_revision=config.base_revision,
        max_model_len=config.max_model_len or 0,
        max_num_seqs=config.max_num_seqs or 1,
        device=config.device,
        dtype=config.dtype,
    )


class Core(Protocol):
    """Interface of what a process serves: an engine, or the journal of a retired one.

    Methods that do nothing here are for a core that has no requests and no adapters.
    """

    @property
    def num_steps(self) -> int:
        """Number of steps that computed something."""
        ...

    @property
    def has_work(self) -> bool: ...

    @property
    def is_settled(self) -> bool:
        """Whether the core has finished, and all of its journal is settled."""
        ...

    def step(self, busy: Busy) -> Sequence[tuple[str, ToGateway]]:
        """Run one step, if there is any, and announce with `busy` whatever may take long."""
        ...

    def handle(self, gateway_id: str, message: object) -> Sequence[tuple[str, ToGateway]]: ...

    def take_stats(self) -> EngineStats: ...

    def close(self) -> None: ...

    def abort_gateway(self, gateway_id: str) -> None:
        """End a gateway's requests."""
        return

    def check_integrity(self) -> None:
        """Assert that all bookkeeping agrees."""
        return

    def finish(self) -> None:
        """Finish, as no request follows; it is called again until the open requests have ended."""
        return

    def take_residency(self) -> list[Residency]:
        return []

    def all_residency(self) -> list[Residency]:
        return []

    def take_service(self, epoch: int) -> list[TenantService]:
        return []


class EngineProcess:
    """Serves gateways until all of them are gone, or the engine has left.

    leaving: how the engine leaves when it is asked to stop.
    beat: tells the supervisor that this loop is alive.
    """

    def __init__(
        self, core: Core, welcome: Welcome, config: EngineConfig, leaving: Leaving, beat: Beat
    ) -> None:
        self.core = core
        self.welcome = welcome
        self._gateways = Gateways(config, core.abort_gateway)
        self._stats_due = self._integrity_due = self._rests_at = 0.0
        self._leaving = leaving
        self._beat = beat

    def run(self) -> None:
        """Serve; then close the journal and the socket."""
        signal.signal(signal.SIGTERM, lambda *_: self._leave())
        try:
            self._serve()
            with self._beat.busy("closing the journal", _CLOSING_S):
                self.core.close()
        finally:
            self._gateways.close()

    def _leave(self) -> None:
        """Begin to leave, and announce it with the next figures."""
        self._leaving.begin()
        self._stats_due = 0.0

    def _serve(self) -> None:
        has_computed = has_work = False
        while not self._has_left() and not self._gateways.are_gone:
            self._beat.beat()
            had_work, has_work = has_work, self.core.has_work
            for gateway_id, message in self._gateways.receive(
                self._poll_ms(has_computed, has_work)
            ):
                self._take(gateway_id, message)
            # Gateways spoke during a long step; nobody is silent before that has been received.
            self._gateways.forget_silent()
            num_steps = self.core.num_steps
            for gateway_id, answer in self.core.step(self._busy):
                self._gateways.send(gateway_id, answer)
            has_computed = self.core.num_steps > num_steps
            self._tell_everybody(is_busy=has_computed or self.core.has_work)
            if had_work and not has_work:
                self._check_integrity()
        reason = "asked to stop" if self._leaving.has_begun else "no gateway any more"
        logger.info("%s: exiting", reason)

    def _has_left(self) -> bool:
        if self._leaving.refuses:
            self.core.finish()
        return self._leaving.is_over(
            has_gateways=bool(self._gateways), is_settled=self.core.is_settled
        )

    def _poll_ms(self, has_computed: bool, has_work: bool) -> int:
        """How long to wait for a message."""
        if has_computed:
            return 0
        if has_work:
            return LOADING_POLL_MS
        return RESTING_POLL_MS if time.monotonic() >= self._rests_at else IDLE_POLL_MS

    @contextmanager
    def _busy(self, what: str, limit_s: float) -> Iterator[None]:
        """Announce long work to the supervisor, and to gateways if they would not wait for it."""
        if limit_s > SILENCE_S:
            self._gateways.announce(replace(self._stats(), silence_s=limit_s))
        with self._beat.busy(what, limit_s):
            yield

    def _check_integrity(self) -> None:
        """Check the core when no request waits for a step; seldom, as one may arrive meanwhile."""
        if (now := time.monotonic()) >= self._integrity_due:
            self._integrity_due = now + INTEGRITY_INTERVAL_S
            self.core.check_integrity()

    def _take(self, gateway_id: str, message: object) -> None:
        """Answer a message of a gateway."""
        answers: Sequence[tuple[str, object]] = ()
        if isinstance(message, Hello):
            greeting = [self.welcome, self._stats(), *self.core.all_residency()]
            answers = [(gateway_id, each) for each in greeting]
        elif self._leaving.refuses and isinstance(message, AddRequest):
            answers = [(gateway_id, refusal(message, LEAVING))]
        elif self._leaving.refuses and isinstance(message, ProveAdapter):
            pass  # Nothing was found out about its adapter.
        else:
            answers = self.core.handle(gateway_id, message)
        for receiver, answer in answers:
            self._gateways.send(receiver, answer)

    def _tell_everybody(self, *, is_busy: bool) -> None:
        """Send residency at once, and figures and service totals four times a second, or once
        while the engine rests.
        """
        moves = self.core.take_residency()
        for move in moves:
            if move.tier == "failed":
                logger.warning("adapter %s: %s", move.object_key, move.error)
        now = time.monotonic()
        if moves or is_busy:
            self._rests_at = now + _REST_AFTER_S
            self._stats_due = min(self._stats_due, now + STATS_INTERVAL_S)
        self._gateways.send_all(moves)
        if now >= self._stats_due:
            rests = now >= self._rests_at
            self._stats_due = now + (RESTING_STATS_INTERVAL_S if rests else STATS_INTERVAL_S)
            self._gateways.send_all([self._stats()])
            self._tell_service()

    def _tell_service(self) -> None:
        """Send service totals to some gateways, which forward them to the other engines.

        If all of them did, each engine would receive the same totals from every gateway.
        """
        if relays := self._gateways.next_relays():
            for message in self.core.take_service(self.welcome.epoch):
                for gateway_id in relays:
                    self._gateways.send(gateway_id, message)

    def _stats(self) -> EngineStats:
        return replace(self.core.take_stats(), is_leaving=self._leaving.has_begun)
