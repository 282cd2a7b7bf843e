"""Requests and tokens a minute, per tenant, in this process: GCRA with refund and debt.

Each limit is one number: when the tenant's bucket would be full again. A minute's worth may come
at once; after that it refills evenly. Time is handed in, in monotonic seconds; nothing here waits.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

_WINDOW_S = 60.0
# A minute's worth of charges, added up one by one, is still a minute.
_ROUNDING_S = 1e-6


class RateLimited(Exception):
    """A limit is reached. limit: `requests` or `tokens`; nothing was charged."""

    def __init__(self, *, limit: str, per_minute: int, retry_after_s: float) -> None:
        self.limit = limit
        self.per_minute = per_minute
        self.retry_after_s = retry_after_s
        super().__init__(
            f"Rate limit reached: {per_minute} {limit} per minute. "
            f"Try again in {format_duration(retry_after_s)}."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """What a tenant may ask for in a minute; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class RateStatus:
    """One limit as its tenant may see it. reset_s: until all of it is there again."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(slots=True, eq=False)
class Reservation:
    """What one request was charged; ends with exactly one `settle` or `cancel`."""

    tenant_id: str
    limits: RateLimits
    _request: "_Charge | None" = None
    _tokens: "_Charge | None" = None

    def settle(self, used_tokens: int, now: float) -> None:
        """The request ran: give back the tokens it did not use, or owe those beyond."""
        _settle(self._request, 1, now)
        _settle(self._tokens, used_tokens, now)

    def cancel(self, now: float) -> None:
        """The request never ran: give back everything."""
        _settle(self._request, 0, now)
        _settle(self._tokens, 0, now)


class Limiter:
    """The rate limits of all tenants, used by one thread.

    max_tenants: whose state is kept, apart from those that have used something a minute ago.
    """

    def __init__(self, max_tenants: int = 10_000) -> None:
        self._max_tenants = max_tenants
        self._tenants: OrderedDict[str, tuple[_Bucket, _Bucket]] = OrderedDict()

    @property
    def num_tenants(self) -> int:
        return len(self._tenants)

    def acquire(self, tenant_id: str, limits: RateLimits, tokens: int, now: float) -> Reservation:
        """Charge a request and its tokens, or neither. Raises RateLimited."""
        reservation = self.acquire_request(tenant_id, limits, now)
        self.acquire_tokens(reservation, tokens, now)
        return reservation

    def acquire_request(self, tenant_id: str, limits: RateLimits, now: float) -> Reservation:
        """Charge a request, before its tokens are known. Raises RateLimited."""
        reservation = Reservation(tenant_id, limits)
        if limits.requests_per_minute is not None:
            requests, _ = self._buckets(tenant_id, now)
            reservation._request = _charge(requests, "requests", 1, limits.requests_per_minute, now)
        return reservation

    def acquire_tokens(self, reservation: Reservation, tokens: int, now: float) -> None:
        """Charge the tokens too; refused, the request is given back. Raises RateLimited."""
        per_minute = reservation.limits.tokens_per_minute
        if per_minute is None:
            return
        _, bucket = self._buckets(reservation.tenant_id, now)
        # Clamped: max_tokens beyond a minute's worth would otherwise never be admitted.
        units = min(tokens, per_minute)
        try:
            reservation._tokens = _charge(bucket, "tokens", units, per_minute, now)
        except RateLimited:
            reservation.cancel(now)
            raise

    def status(self, tenant_id: str, limits: RateLimits, now: float) -> dict[str, RateStatus]:
        """`requests` and `tokens` as they stand, for those that are limited."""
        requests, tokens = self._tenants.get(tenant_id) or (_Bucket(), _Bucket())
        found = {}
        if limits.requests_per_minute is not None:
            found["requests"] = requests.status(limits.requests_per_minute, now)
        if limits.tokens_per_minute is not None:
            found["tokens"] = tokens.status(limits.tokens_per_minute, now)
        return found

    def headers(self, tenant_id: str, limits: RateLimits, now: float) -> dict[str, str]:
        """`x-ratelimit-*` as OpenAI sends them, on an answer of 200 and of 429 alike."""
        headers = {}
        for name, status in self.status(tenant_id, limits, now).items():
            headers[f"x-ratelimit-limit-{name}"] = str(status.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(status.remaining)
            headers[f"x-ratelimit-reset-{name}"] = format_duration(status.reset_s)
        return headers

    def _buckets(self, tenant_id: str, now: float) -> "tuple[_Bucket, _Bucket]":
        buckets = self._tenants.get(tenant_id)
        if buckets is None:
            self._forget_idle(now)
            buckets = self._tenants[tenant_id] = (_Bucket(), _Bucket())
        self._tenants.move_to_end(tenant_id)
        return buckets

    def _forget_idle(self, now: float) -> None:
        # Only full buckets: forgetting another would give its tenant a second minute's worth.
        while len(self._tenants) >= self._max_tenants:
            tenant_id, buckets = next(iter(self._tenants.items()))
            if not all(bucket.is_idle(now) for bucket in buckets):
                return
            del self._tenants[tenant_id]


def retry_headers(retry_after_s: float) -> dict[str, str]:
    """`retry-after` in whole seconds, and `retry-after-ms` for clients that read it."""
    return {
        "retry-after": str(max(1, math.ceil(retry_after_s))),
        "retry-after-ms": str(max(1, math.ceil(retry_after_s * 1000))),
    }


def format_duration(seconds: float) -> str:
    """As Go prints durations, rounded up to milliseconds: `120ms`, `1s`, `8.64s`, `6m0s`."""
    total_ms = math.ceil(round(seconds * 1000, 3))
    if 0 < total_ms < 1000:
        return f"{total_ms}ms"
    minutes, rest_ms = divmod(total_ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{rest_ms / 1000:g}s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text


@dataclass(slots=True, eq=False)
class _Charge:
    """What one request holds of one bucket.   low_s: the lowest backlog since it was charged."""

    bucket: "_Bucket"
    s_per_unit: float
    units: int
    low_s: float


class _Bucket:
    """One limit of one tenant. full_at: GCRA's theoretical arrival time."""

    __slots__ = ("_charges", "full_at")

    def __init__(self) -> None:
        self.full_at = -math.inf
        self._charges: OrderedDict[int, _Charge] = OrderedDict()

    def is_idle(self, now: float) -> bool:
        return not self._charges and self.full_at <= now

    def wait_s(self, units: int, per_minute: int, now: float) -> float:
        """Seconds until `units` fit; 0 when they fit now."""
        wait_s = self._backlog_s(now) + units * _WINDOW_S / per_minute - _WINDOW_S
        return wait_s if wait_s > _ROUNDING_S else 0.0

    def charge(self, units: int, per_minute: int, now: float) -> _Charge:
        self._lower(self._backlog_s(now))
        s_per_unit = _WINDOW_S / per_minute
        self.full_at = max(self.full_at, now) + units * s_per_unit
        charge = _Charge(self, s_per_unit, units, low_s=self.full_at - now)
        self._charges[id(charge)] = charge
        return charge

    def settle(self, charge: _Charge, used: int, now: float) -> None:
        """Refund what was not used, or charge what was used beyond. The second time is nothing.

        At most the lowest backlog since the charge comes back: without the charge the bucket would
        have been full at that moment, and what refills a full bucket is lost.
        """
        if self._charges.get(id(charge)) is not charge:
            return
        self._lower(self._backlog_s(now))
        unused_s = (charge.units - used) * charge.s_per_unit
        if unused_s < 0:
            self.full_at = max(self.full_at, now) - unused_s
        else:
            refund_s = min(unused_s, charge.low_s)
            self.full_at = max(self.full_at - refund_s, now)
            self._rewrite(charge, refund_s)
        del self._charges[id(charge)]

    def _rewrite(self, charge: _Charge, refund_s: float) -> None:
        """Correct the other open charges, as if `charge` had been smaller from its first moment."""
        for other in reversed(self._charges.values()):
            if other is charge:
                break
            other.low_s -= refund_s
        low_s = charge.low_s - refund_s
        for other in self._charges.values():
            if other is charge:
                break
            other.low_s = min(other.low_s, low_s)

    def status(self, per_minute: int, now: float) -> RateStatus:
        backlog_s = self._backlog_s(now)
        remaining = math.floor((_WINDOW_S - backlog_s + _ROUNDING_S) * per_minute / _WINDOW_S)
        return RateStatus(per_minute, max(remaining, 0), backlog_s)

    def _backlog_s(self, now: float) -> float:
        return max(self.full_at - now, 0.0)

    def _lower(self, backlog_s: float) -> None:
        # The newer stand no lower than the older, so the walk ends at the first that is low enough.
        for charge in reversed(self._charges.values()):
            if charge.low_s <= backlog_s:
                break
            charge.low_s = backlog_s


def _charge(bucket: _Bucket, limit: str, units: int, per_minute: int, now: float) -> _Charge:
    wait_s = bucket.wait_s(units, per_minute, now)
    if wait_s > 0:
        raise RateLimited(limit=limit, per_minute=per_minute, retry_after_s=wait_s)
    return bucket.charge(units, per_minute, now)


def _settle(charge: _Charge | None, used: int, now: float) -> None:
    if charge is not None:
        charge.bucket.settle(charge, used, now)
