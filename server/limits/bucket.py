"""One limit's state, in integers: a bucket of requests or tokens a minute, or a set of seats.

`limits.lua` does the same step by step; every number stays below 2^53, up to which Lua counts
exactly.
"""

from collections.abc import Sequence

import msgspec

from server.limits.rules import Holder, Limit, Standing

WINDOW_MS = 60_000
"""Window of every rate: a minute's worth may come at once, and refills evenly in a minute."""


class Charge(msgspec.Struct):
    """An open charge.   charged: units x 60,000.   low: the lowest backlog since."""

    charged: int
    low: int
    expires_ms: int


class Bucket(msgspec.Struct, tag=True):
    """A leaky bucket of requests or tokens, which drains `amount` units a minute.

    Callers tell it the time; an earlier time changes nothing.
    backlog: level in units x 60,000; it falls by `amount` per ms. If more tokens are used than were
    charged, it may exceed a full bucket, `amount` x 60,000.
    charges: the open ones, the oldest first.   quiet_until_ms: time before which none expires.
    """

    amount: int
    backlog: int
    at_ms: int
    charges: dict[str, Charge] = {}
    quiet_until_ms: int = 0

    def touch(self, amount: int, now_ms: int) -> None:
        """Let the time until now pass under the amount so far, and then change it to `amount`."""
        self.backlog = backlog = self._backlog(now_ms)
        self.at_ms = now_ms = max(now_ms, self.at_ms)
        self.amount = amount
        # The lowest backlog of a newer charge is no lower than that of an older one, so the walk
        # ends at the first charge that is low enough.
        for charge in reversed(self.charges.values()):
            if charge.low <= backlog:
                break
            charge.low = backlog
        # A look for expired charges walks over all open ones, so it waits for the first expiry.
        if now_ms >= self.quiet_until_ms:
            self._drop_expired(now_ms)

    def wait_ms(self, amount: int, units: int, now_ms: int) -> int:
        """Milliseconds until `units` fit if nothing else happens; 0 if they fit now."""
        if amount <= 0:
            return WINDOW_MS
        # Units are clamped, since a request for more than the limit would never be admitted.
        units = min(units, amount)
        missing = self._backlog(now_ms) + (units - amount) * WINDOW_MS
        return max(0, -(-missing // amount))

    def charge(self, request_id: str, units: int, lifetime_ms: int) -> None:
        """Take units for a request, at the time of the last `touch`."""
        charged = min(units, self.amount) * WINDOW_MS
        # A request that Redis let pass may find less room here than it takes; then none is left.
        self.backlog = min(self.backlog + charged, self.amount * WINDOW_MS)
        expires_ms = self.at_ms + lifetime_ms
        self.charges[request_id] = Charge(charged, self.backlog, expires_ms)
        self.quiet_until_ms = min(self.quiet_until_ms, expires_ms)

    def release(self, request_id: str, used: int, now_ms: int) -> None:
        """Refund the unused part of a charge, or charge what was used beyond it. Without a charge
        of the request, nothing happens.

        The refund is at most the lowest backlog since the charge: without the charge the bucket
        would have been full at that moment, and a full bucket does not refill.
        """
        self.touch(self.amount, now_ms)
        charge = self.charges.get(request_id)
        if charge is None:
            return
        unused = charge.charged - used * WINDOW_MS
        if unused < 0:
            self.backlog -= unused
        else:
            refund = min(unused, charge.low)
            self.backlog -= refund
            self._rewrite(charge, refund)
        del self.charges[request_id]

    def _drop_expired(self, now_ms: int) -> None:
        # An expired charge counts as used up, so nothing of it is refunded.
        for request_id in [key for key, it in self.charges.items() if it.expires_ms <= now_ms]:
            del self.charges[request_id]
        ends = (charge.expires_ms for charge in self.charges.values())
        self.quiet_until_ms = min(ends, default=now_ms + WINDOW_MS)

    def _rewrite(self, charge: Charge, refund: int) -> None:
        """Correct the other open charges, as if `charge` had been smaller from its first moment."""
        low, is_newer = charge.low - refund, True
        for other in reversed(self.charges.values()):
            if other is charge:
                is_newer = False
            elif is_newer:
                other.low -= refund
            elif other.low <= low:
                break
            else:
                other.low = low

    def standing(self, limit: Limit, now_ms: int, *, with_holders: bool) -> Standing:
        """The limit as it is now."""
        backlog = self._backlog(now_ms)
        now_ms = max(now_ms, self.at_ms)
        return Standing(
            limit=limit,
            remaining=max(0, limit.amount - -(-backlog // WINDOW_MS)),
            reset_ms=-(-backlog // limit.amount) if limit.amount > 0 else WINDOW_MS,
            holders=tuple(
                Holder(request_id, it.charged // WINDOW_MS, it.expires_ms - now_ms)
                for request_id, it in self.charges.items()
                if it.expires_ms > now_ms
            )
            if with_holders
            else (),
        )

    def is_idle(self, now_ms: int) -> bool:
        """Whether the state equals a new one, so that it may be dropped."""
        return self._backlog(now_ms) == 0 and all(
            charge.expires_ms <= now_ms for charge in self.charges.values()
        )

    def _backlog(self, now_ms: int) -> int:
        return max(0, self.backlog - self.amount * max(0, now_ms - self.at_ms))


class Seats(msgspec.Struct, tag=True):
    """Requests at a time: a set of those under way, each until its time runs out.

    Its methods are those of `Bucket`. A counter instead of the set would go wrong if a release
    were lost or came twice.
    """

    at_ms: int
    expiries: dict[str, int] = {}
    quiet_until_ms: int = 0

    def touch(self, amount: int, now_ms: int) -> None:
        self.at_ms = now_ms = max(now_ms, self.at_ms)
        if now_ms >= self.quiet_until_ms:
            self.expiries = dict(self._taken(now_ms))
            self.quiet_until_ms = min(self.expiries.values(), default=now_ms + WINDOW_MS)

    def wait_ms(self, amount: int, units: int, now_ms: int) -> int:
        if amount <= 0:
            return WINDOW_MS
        if len(self.expiries) < amount:
            return 0
        now_ms = max(now_ms, self.at_ms)
        ends = sorted(expires_ms for _, expires_ms in self._taken(now_ms))
        # `missing` requests have to end before one more may begin.
        missing = len(ends) + 1 - amount
        return ends[missing - 1] - now_ms if missing > 0 else 0

    def charge(self, request_id: str, units: int, lifetime_ms: int) -> None:
        expires_ms = self.at_ms + lifetime_ms
        self.expiries[request_id] = expires_ms
        self.quiet_until_ms = min(self.quiet_until_ms, expires_ms)

    def release(self, request_id: str, used: int, now_ms: int) -> None:
        self.touch(0, now_ms)
        self.expiries.pop(request_id, None)

    def standing(self, limit: Limit, now_ms: int, *, with_holders: bool) -> Standing:
        now_ms = max(now_ms, self.at_ms)
        taken = self._taken(now_ms)
        ends = [expires_ms for _, expires_ms in taken]
        return Standing(
            limit=limit,
            remaining=max(0, limit.amount - len(ends)),
            reset_ms=min(ends, default=now_ms) - now_ms,
            holders=tuple(Holder(key, 1, expires_ms - now_ms) for key, expires_ms in taken)
            if with_holders
            else (),
        )

    def is_idle(self, now_ms: int) -> bool:
        return not self._taken(now_ms)

    def _taken(self, now_ms: int) -> Sequence[tuple[str, int]]:
        now_ms = max(now_ms, self.at_ms)
        return [seat for seat in self.expiries.items() if seat[1] > now_ms]
