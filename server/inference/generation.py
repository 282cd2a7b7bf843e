"""An admitted request to the end of its answer, as the engine's outputs.

Begin with `server.inference.admission`, which comes before. The engine's journal decides what is
paid; nothing here counts a token for the bill.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sqlalchemy.engine import Connection

from engine.errors import EngineAwayError, EngineDeadError, FirstTokenLate, RequestRefused
from engine.wire.delivery import Take
from engine.wire.messages import RequestOutput
from registry.errors import Fault
from server import logs
from server.billing.failures import Failures
from server.billing.holds import move_hold, void_refused
from server.billing.rating import rated_amounts
from server.database.clock import now_ms
from server.database.database import Database
from server.inference import errors, outcomes
from server.inference.output_stream import OutputStream
from server.inference.progress import Progress
from server.inference.request_metrics import RequestMetrics
from server.inference.ticket import Ticket
from server.limits.learned import LearnedTokens
from server.limits.memory import MemoryLimiter
from server.pool.suspects import Suspected
from server.traces import spans

_MAX_MOVES = 2
"""How often a request may move to another engine because its own was found dead."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Runs admitted requests to their end.

    cached_token_weight: share of a cached prompt token that counts against the limits, in [0, 1].
    count_move: called for each request that moves to another engine.
    """

    database: Database
    limiter: MemoryLimiter
    learned_tokens: LearnedTokens
    failures: Failures
    hold_lifetime_s: float
    cached_token_weight: float
    metrics: RequestMetrics
    count_move: Callable[[], None]

    def begin(self, ticket: Ticket) -> OutputStream:
        """Begin to run an admitted request; its outputs end with a Fault if it fails."""
        return OutputStream(lambda take: self._run(ticket, take))

    @spans.traced("engine")
    async def _run(self, ticket: Ticket, take: Take) -> None:
        """Run a request to its end. Cancelling this aborts it. Raises Fault, what `take` raises."""
        message = ticket.message
        progress = Progress(ticket, take, self.metrics)
        is_accepted = True
        try:
            async with self.unpaid_if_broken(ticket):
                await self._at_engines(ticket, progress.note)
            self._learn(ticket, progress.last)
        except (RequestRefused, Suspected, EngineAwayError) as refused:
            is_accepted = False
            await self._void(message.request_id)
            raise outcomes.refusal_of(refused) from None
        except FirstTokenLate:
            raise errors.first_token_timeout(message.first_token_timeout_s) from None
        except EngineDeadError:
            raise errors.engine_unavailable() from None
        finally:
            progress.tell()
            self._count(ticket, progress.last)
            ticket.base.load.remove(ticket.running)
            used_tokens = self._used_tokens(progress.last) if is_accepted else None
            self.limiter.release(ticket.grant, used_tokens)

    @asynccontextmanager
    async def unpaid_if_broken(self, ticket: Ticket) -> AsyncGenerator[None, None]:
        """Make a request free if a dead engine or an unforeseen error ends it.

        The client gets an error and pays nothing, though the engine may have ended the request, and
        synced its end record, before it died.
        """
        try:
            yield
        except (Fault, EngineAwayError, RequestRefused, Suspected):
            raise
        except Exception:
            await self.failures.note(ticket.request_id)
            raise

    async def _at_engines(self, ticket: Ticket, take: Take) -> None:
        """Run at the request's engine, or at another if the first is gone and never had it."""
        engines = ticket.base.engines
        for moves_left in reversed(range(_MAX_MOVES + 1)):
            logs.note(engine=ticket.running.engine)
            try:
                if (engine := engines.find(ticket.running.engine)) is None:
                    raise EngineAwayError("the engine is gone")
                return await engine.generate(ticket.message, take)
            except EngineAwayError:
                if not moves_left:
                    raise
                await self._move(ticket)

    async def _move(self, ticket: Ticket) -> None:
        """Move the hold to another engine before the request is sent there. Raises EngineAwayError
        if there is no other engine.
        """
        request_id, running = ticket.request_id, ticket.running
        engine = ticket.base.engines.route(ticket.message, besides=running.engine)
        lifetime_ms = int(self.hold_lifetime_s * 1000)

        def write(conn: Connection) -> bool:
            return move_hold(conn, request_id, engine.engine_id, lifetime_ms)

        if not await self.database.write(write):
            raise EngineAwayError("its hold has been resolved")
        ticket.base.running.move(running, engine.name)
        self.count_move()

    def _count(self, ticket: Ticket, last: RequestOutput | None) -> None:
        """Count a request that has ended; without its last output, its client left or it failed."""
        if last is not None and last.is_last:
            outcome = last.finish_reason or "error"
            self.metrics.note_end(ticket, outcome, last, cost_nanousd(ticket, last))
        else:
            task = asyncio.current_task()
            has_left = task is not None and task.cancelling() > 0
            self.metrics.note_end(ticket, "abort" if has_left else "error", None, 0)

    def _learn(self, ticket: Ticket, last: RequestOutput | None) -> None:
        """Learn the length of answers that ended by themselves."""
        if last is None or ticket.request.max_tokens is not None:
            return
        if last.finish_reason in ("stop", "length"):
            tokens = last.num_completion_tokens // ticket.message.num_answers
            self.learned_tokens.learn(ticket.tenant_id, tokens)

    def _used_tokens(self, last: RequestOutput | None) -> int:
        """Tokens that count against the limits; cached ones count by their weight."""
        if last is None:
            return 0
        cached = last.num_cached_tokens
        counted = math.ceil(cached * self.cached_token_weight)
        return last.num_prompt_tokens - cached + counted + last.num_completion_tokens

    async def _void(self, request_id: str) -> None:
        """Void the hold at once, because the engine never accepted the request."""
        await self.database.write(lambda conn: void_refused(conn, request_id, now_ms()))


def cost_nanousd(ticket: Ticket, final: RequestOutput) -> int:
    """The cost of the request under the price that was held. final: its last output."""
    assert final.finish_reason is not None
    assert final.stop_cause is not None
    return rated_amounts(
        final.finish_reason,
        final.stop_cause,
        final.num_prompt_tokens,
        final.num_cached_tokens,
        final.num_completion_tokens,
        ticket.price,
    ).total
