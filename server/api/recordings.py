"""Answers to requests with an Idempotency-Key: made to their end, whether or not a client reads
them, and stored for repeats.
"""

import asyncio
import contextlib
import logging
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec

from registry.errors import Failed, Fault, Limited, Overloaded, QuotaExceeded, Unavailable
from server.api.errors import answer_of
from server.billing.failures import Failures
from server.database.database import LedgerUnavailable
from server.inference.errors import IdempotencyKeyInUse, IdempotencyKeyMismatch, draining
from server.inference.idempotency import MAX_STORED_BYTES, Claim, IdempotencyKeys, StoredAnswer

logger = logging.getLogger(__name__)

MAX_BUFFERED = 64
"""Events between a request and its reader; a slower reader slows down its own request."""
_INLINE_BYTES = 1 << 16
"""Size above which a piece is compressed on a thread: 64 KiB take 2 ms."""
_RETRY_S = 1.0
_CLOSE_S = 5.0
"""Time for answers to be stored at shutdown; their requests have been waited for before."""


class Recording:
    """One answer. Its maker calls `begin`, `put`, `finish`; one response may read it meanwhile.

    request_ids: of the requests that were sent to engines for it.   request_id: of the one that the
    answer is of.   headers: those of the answer, also if it is an error, beside its own.
    """

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.request_id = claim.request_id
        self.request_ids: list[str] = []
        self.headers: dict[str, str] = {}
        self.is_paid = False
        self.live_headers: dict[str, str] = {}
        self._head: asyncio.Future[tuple[int, dict[str, str]]] = asyncio.Future()
        self._unread: asyncio.Queue[bytes | None] = asyncio.Queue()  # None is the end
        self._room = asyncio.Semaphore(MAX_BUFFERED)
        self._last = b""
        self._is_read = True
        self._failure: BaseException | None = None
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._compressor = zlib.compressobj()

    # ---- for the task that makes the answer ----

    def hold(self, live_headers: dict[str, str]) -> None:
        """Note that the request is paid for: from here on its outcome is the answer, even an error.

        live_headers: for the response that reads along; a repeat has its own.
        """
        self.is_paid = True
        self.live_headers = live_headers

    def begin(self, status: int, headers: dict[str, str]) -> None:
        self._head.set_result((status, self.headers | headers))

    async def answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        """Record a whole answer at once."""
        self.begin(status, headers | {"content-length": str(len(content))})
        await self.finish(content)

    @property
    def has_begun(self) -> bool:
        return self._head.done()

    async def put(self, data: bytes) -> None:
        """Add to the body; wait for the reader while there is one and it is behind."""
        await self._compress(data)
        if self._is_read:
            await self._room.acquire()
            self._unread.put_nowait(data)

    async def finish(self, data: bytes) -> None:
        """Add the last piece, which the reader gets at the end, after the answer is stored: who has
        all of an answer may repeat the request at once.
        """
        await self._compress(data)
        self._last = data

    def fail(self, error: BaseException) -> None:
        """End with this error instead of an answer; a body that has begun breaks off."""
        self._failure = error
        if not self._head.done():
            self._head.set_exception(error)
            self._head.exception()  # marks it as seen: there may be no reader

    def end(self) -> None:
        """Give the reader the last piece; a second call changes nothing."""
        if self._last:
            self._unread.put_nowait(self._last)
        self._last = b""
        self._unread.put_nowait(None)

    def stored(self) -> StoredAnswer | None:
        """The whole answer; None if the request was not paid for or has failed."""
        if not self.is_paid or self._failure:
            return None
        self._keep(self._compressor.flush())
        body = b"".join(self._kept) if self._kept_bytes <= MAX_STORED_BYTES else None
        status, headers = self._head.result()
        return StoredAnswer(self.request_id, status, headers, body)

    async def _compress(self, data: bytes) -> None:
        if len(data) > _INLINE_BYTES:
            self._keep(await asyncio.to_thread(self._compressor.compress, data))
        else:
            self._keep(self._compressor.compress(data))

    def _keep(self, compressed: bytes) -> None:
        if not compressed:  # the compressor gathers small pieces
            return
        self._kept_bytes += len(compressed)
        if self._kept_bytes <= MAX_STORED_BYTES:
            self._kept.append(compressed)
        else:
            self._kept.clear()

    # ---- for the response that reads the answer ----

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers. Raises the error of a request that failed before it had any."""
        return await asyncio.shield(self._head)

    async def body(self) -> AsyncGenerator[bytes, None]:
        """The body to its end; a reader that leaves early does not affect the request."""
        try:
            while (data := await self._unread.get()) is not None:
                self._room.release()
                yield data
            if self._failure:
                raise self._failure
        finally:
            await self.leave()

    async def leave(self) -> None:
        """End the reading; the request goes on."""
        self._is_read = False
        self._unread = asyncio.Queue()
        self._room.release()


class Recorder:
    """All recordings of a gateway.

    Their number is bounded: no recording outlasts its claim, those that run are limited as other
    requests are, and while the ledger cannot store answers, no new request is admitted.
    """

    def __init__(self, keys: IdempotencyKeys, failures: Failures) -> None:
        self._keys = keys
        self._failures = failures
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way: dict[tuple[str, ...], Claim] = {}  # by place

    async def claim(self, claim: Claim) -> StoredAnswer | None:
        """Claim a key, or return its stored answer. Raises what IdempotencyKeys.claim does.

        The database's row says what is under way here, too, but expires early if the clock is set
        ahead meanwhile.
        """
        if running := self._under_way.get(claim.place):
            is_same = running.body_sha256 == claim.body_sha256
            raise IdempotencyKeyInUse if is_same else IdempotencyKeyMismatch
        return await self._keys.claim(claim)

    def start(self, claim: Claim, make: Callable[[Recording], Awaitable[None]]) -> Recording:
        """Run `make`, which admits the request and fills the recording, or raises."""
        recording = Recording(claim)
        self._under_way[claim.place] = claim
        task = asyncio.create_task(self._run(recording, make))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return recording

    async def close(self) -> None:
        """Wait for the recordings, then cancel them: they cost nothing and release their keys."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(
        self, recording: Recording, make: Callable[[Recording], Awaitable[None]]
    ) -> None:
        ends_at = asyncio.get_running_loop().time() + self._keys.claim_ms / 1000
        try:
            async with asyncio.timeout_at(ends_at):
                await make(recording)
        except asyncio.CancelledError:
            for request_id in recording.request_ids:
                await self._failures.note(request_id)
            await self._let_go(recording, draining())
            raise
        # Every error is caught, because a reader waits for the answer.
        except Exception as error:
            await self._answer_error(recording, error)
        if answer := recording.stored():
            await self._store(recording, answer, ends_at)
        for request_id in recording.request_ids:
            self._failures.note_answered(request_id)
        self._under_way.pop(recording.claim.place, None)
        recording.end()

    async def _answer_error(self, recording: Recording, error: Exception) -> None:
        """Make the error the answer if the request was paid for and would end like this again; else
        release its key.
        """
        is_paid, has_begun = recording.is_paid, recording.has_begun
        if is_paid and not isinstance(error, Fault):
            logger.error("a request with an Idempotency-Key failed", exc_info=error)
            error = error if has_begun else Failed()
        if isinstance(error, Fault) and _is_final(error) and is_paid and not has_begun:
            answer = answer_of(error)
            headers = answer.headers | {"content-type": "application/json"}
            await recording.answer(answer.status, headers, msgspec.json.encode(answer.body))
        else:
            await self._let_go(recording, error)

    async def _let_go(self, recording: Recording, error: BaseException) -> None:
        # The key comes first: a client that sees the failure may send the request again at once.
        with contextlib.suppress(LedgerUnavailable):  # the claim expires by itself
            await self._keys.release(recording.claim)
        self._under_way.pop(recording.claim.place, None)
        recording.fail(error)

    async def _store(self, recording: Recording, answer: StoredAnswer, until: float) -> None:
        """Store the answer; while the ledger is away, let the reader go and try again."""
        while True:
            try:
                await self._keys.store(recording.claim, answer)
                return
            except LedgerUnavailable:
                # The reader is not kept waiting for the ledger.
                recording.end()
            if asyncio.get_running_loop().time() >= until:
                logger.warning("an answer could not be kept: the ledger is away")
                return
            await asyncio.sleep(_RETRY_S)


def _is_final(fault: Fault) -> bool:
    """Whether the same request would end like this again; if not, nothing was billed for it."""
    return not isinstance(fault, QuotaExceeded | Limited | Overloaded | Unavailable)
