"""The prover: has the engine prove uploads whose files are checked, and makes versions of them.

Each gateway has one prover. It claims an upload before the proof and renews the claim during it, so
that two gateways do not prove the same upload. The claim of a dead gateway expires, and the next
gateway that polls proves the upload. If two gateways do prove the same upload, only the first
verdict counts.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from sqlalchemy import Connection

from engine.errors import EngineAwayError, EngineDeadError
from registry.catalog.catalog import Catalog
from registry.errors import Conflict, NoRoom, StorageError
from registry.formats.peft_format import write_hashed
from registry.ref import AdapterRef, BaseRef
from registry.storage.free_space import WorkDir
from registry.storage.storage import Storage
from registry.uploads.ends import finish_proof
from registry.uploads.proof import PROOF_FAILED, Proof
from registry.uploads.proving import claim_proof, claim_proofs
from registry.uploads.rows import PROVING, Upload, get_upload
from server.database.clock import now_ms
from server.database.database import Database, DatabaseError

logger = logging.getLogger(__name__)

_MAX_DEATHS = 2
"""How often an engine may die while it proves an upload; then the proof has failed. After the first
death it is tried where nobody else is served.
"""
_MAX_REMEMBERED = 1000
"""Uploads whose engine deaths one gateway keeps count of."""

_CLAIM_S = 10.0
"""Lifetime of a claim, so that a killed gateway's uploads wait at most this long."""

_UNAVAILABLE = Proof(verdict="unavailable", message="The engine is not available.")

Prove = Callable[[BaseRef, AdapterRef, Path, bool], Awaitable[Proof]]


@dataclass(slots=True, eq=False)
class Prover:
    """Proves the uploads that it claims.

    prove: has an engine of this base model prove the canonical object in a local file, and serve
    nobody else meanwhile if the last argument says so; raises EngineDeadError, and EngineAwayError
    if no engine had it.
    work: where objects are fetched to, on the engine's machine.
    max_running: uploads in progress at once.
    poll_s: interval between polls for new uploads, and between renewals of claims.
    retry_s: delay before an upload is proved again after the verdict "unavailable".
    notice_s: interval at which `wait_proved` reads an upload that another gateway may prove.
    """

    database: Database
    catalog: Catalog
    storage: Storage
    prove: Prove
    _: KW_ONLY
    is_ready: Callable[[], bool]
    work: WorkDir
    max_running: int = 2
    poll_s: float = 2.0
    retry_s: float = 5.0
    notice_s: float = 1.0
    now_ms: Callable[[], int] = now_ms
    _running: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    # Claimed uploads without a verdict yet, by upload_id.
    _claimed: dict[str, Upload] = field(default_factory=dict, init=False)
    _deaths: OrderedDict[str, int] = field(default_factory=OrderedDict, init=False)
    # The engines of a base model prove one upload at a time, so that a death has only one suspect.
    # The next object is fetched meanwhile.
    _engines: defaultdict[str, asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock), init=False
    )
    _woken: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _ended: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def wake(self) -> None:
        """Make `run` look for uploads now instead of at the next poll."""
        self._woken.set()

    async def run(self) -> None:
        """Prove uploads until cancelled; then release the claims for other gateways to prove."""
        try:
            while True:
                self._woken.clear()
                try:
                    await self.step()
                except DatabaseError as error:
                    logger.warning("uploads cannot be proved now: %s", error)
                await _wait(self._woken, self.poll_s)
        finally:
            await self._give_back()

    async def step(self) -> None:
        """Renew the claims of running proofs, and start as many new ones as there is room for."""
        if self._claimed:
            await self._renew_claims(_CLAIM_S)
        room = self.max_running - len(self._running)
        if room > 0 and self.is_ready():
            claimed = await self.database.write(
                lambda conn: claim_proofs(conn, self.now_ms(), limit=room, claim_ms=_ms(_CLAIM_S))
            )
            for upload in claimed:
                self._claimed[upload.upload_id] = upload
                task = asyncio.create_task(self._run_one(upload), name=upload.upload_id)
                self._running.add(task)
                task.add_done_callback(self._note_end)

    async def wait_proved(self, upload: Upload, timeout_s: float) -> Upload:
        """Return the upload when its proof has ended, or as it is after `timeout_s`."""
        tenant_id, upload_id = upload.tenant_id, upload.upload_id
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        self.wake()
        while upload.state == PROVING and clock() < deadline:
            await _wait(self._ended, min(deadline - clock(), self.notice_s))
            upload = await self.database.read(
                lambda conn: get_upload(conn, tenant_id, upload_id, self.now_ms())
            )
        return upload

    # ---- one upload ----

    async def _run_one(self, upload: Upload) -> None:
        try:
            proof = await self._proof_of(upload)
            # A renewal after this point would overwrite the retry time that finish_proof sets.
            self._claimed.pop(upload.upload_id, None)
            ended = await self.database.write(
                lambda conn: finish_proof(
                    conn,
                    self.catalog,
                    upload,
                    proof,
                    self.now_ms(),
                    retry_ms=_ms(self.retry_s),
                )
            )
            if ended.state != PROVING:
                self._deaths.pop(upload.upload_id, None)
        except (DatabaseError, Conflict) as error:
            # The claim expires and the upload is proved again, unless it has ended.
            logger.warning("%s cannot be proved now: %s", upload.upload_id, error)

    async def _proof_of(self, upload: Upload) -> Proof:
        assert upload.built is not None
        base = upload.built.base
        if (served := self.catalog.bases.serving(base)) is None:
            message = "The base model was changed after the files were checked; upload them again."
            return Proof(verdict="not_served", message=message)
        # The upload has no version number yet; the engine identifies adapters by digest and key.
        ref = upload.built.ref_as(upload.upload_id, version=0)
        try:
            with self.work.folder(f"{upload.upload_id}-proof-", ref.size_bytes) as folder:
                path = folder / "canonical.safetensors"
                await asyncio.to_thread(self._fetch, ref, path)
                async with self._engines[served.model_id]:
                    return await self._ask_engine(upload, base, ref, path)
        except (NoRoom, StorageError, OSError) as error:
            logger.warning("%s cannot be proved now: %s", upload.upload_id, error)
            return Proof(verdict="unavailable", message="The adapter store is not available.")

    async def _ask_engine(
        self, upload: Upload, base: BaseRef, ref: AdapterRef, path: Path
    ) -> Proof:
        alone = self._deaths.get(upload.upload_id, 0) > 0
        try:
            return await self.prove(base, ref, path, alone)
        except EngineAwayError:  # no engine had the adapter
            return _UNAVAILABLE
        except EngineDeadError:
            deaths = self._deaths.pop(upload.upload_id, 0) + 1
            self._deaths[upload.upload_id] = deaths
            if len(self._deaths) > _MAX_REMEMBERED:
                self._deaths.popitem(last=False)
        if deaths < _MAX_DEATHS:
            return _UNAVAILABLE
        logger.error("the engine died %d times while it proved %s", deaths, upload.upload_id)
        return Proof(verdict="proof_failed", message=PROOF_FAILED)

    def _fetch(self, ref: AdapterRef, path: Path) -> None:
        """Copy the object to `path`. Raises StorageError, also if its sha256 is not the digest."""
        with path.open("wb") as file:
            written = write_hashed(file, self.storage.read(ref.object_key))
        if written.digest != ref.digest:
            raise StorageError(key=ref.object_key, reason="other bytes than were put")

    # ---- what runs ----

    async def _renew_claims(self, claim_s: float) -> None:
        """Claim the uploads without a verdict for claim_s from now; 0 gives them back."""
        claimed = list(self._claimed.values())

        def renew(conn: Connection) -> None:
            for upload in claimed:
                claim_proof(conn, upload, self.now_ms() + _ms(claim_s))

        await self.database.write(renew)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._running.remove(task)
        if not task.cancelled() and (error := task.exception()):
            self._claimed.pop(task.get_name(), None)
            logger.error("proving %s failed", task.get_name(), exc_info=error)
        ended, self._ended = self._ended, asyncio.Event()
        ended.set()
        self.wake()

    async def _give_back(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        with contextlib.suppress(DatabaseError):
            await self._renew_claims(0)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    # asyncio.wait_for in Python 3.11 may swallow a cancellation that comes with the event.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
