"""Headers that tell a client its limits: OpenAI's, the IETF's, and when to retry.

Sources: OpenAI's guide to rate limits; draft-ietf-httpapi-ratelimit-headers.
"""

import math
from collections.abc import Sequence

from server.limits.rules import RateLimited, Standing

_WINDOW_S = 60


def limit_headers(standings: Sequence[Standing], *, is_degraded: bool = False) -> dict[str, str]:
    """Headers of an answer, a 200 and a 429 alike; a metric without a limit has none.

    OpenAI's headers show, of several limits of a metric, the one with the smallest share left; the
    IETF's do so for a key and those above it, since a name may stand there once.
    """
    headers = {}
    by_name: dict[str, Standing] = {}
    for standing in standings:
        seen = by_name.get(_name(standing), standing)
        by_name[_name(standing)] = min(seen, standing, key=_share_left)
    for metric in ("requests", "tokens"):
        if of_metric := [s for s in standings if s.limit.metric == metric]:
            standing = min(of_metric, key=_share_left)
            headers[f"x-ratelimit-limit-{metric}"] = str(standing.limit.amount)
            headers[f"x-ratelimit-remaining-{metric}"] = str(standing.remaining)
            headers[f"x-ratelimit-reset-{metric}"] = format_duration(standing.reset_ms / 1000)
    if standings:
        headers["x-ratelimit-scope"] = _scope(min(standings, key=_share_left))
        headers["ratelimit-policy"] = ", ".join(map(_policy, by_name.values()))
        headers["ratelimit"] = ", ".join(map(_state, by_name.values()))
    if is_degraded:
        headers["x-chorale-limiter"] = "degraded"
    return headers


def refusal_headers(error: RateLimited) -> dict[str, str]:
    """Headers of a 429: the limits, and which one refused."""
    return {
        **limit_headers(error.standings, is_degraded=error.is_degraded),
        "x-ratelimit-scope": f"{error.limit.metric};{error.limit.scope}",
        "x-should-retry": "true",
    }


def retry_headers(retry_after_s: float) -> dict[str, str]:
    """`retry-after` in whole seconds, and `retry-after-ms` for clients that read it."""
    return {
        "retry-after": str(max(1, math.ceil(retry_after_s))),
        "retry-after-ms": str(max(1, math.ceil(retry_after_s * 1000))),
    }


def format_duration(seconds: float) -> str:
    """A duration as Go prints it, rounded up to milliseconds: `120ms`, `1s`, `8.64s`, `6m0s`."""
    total_ms = math.ceil(round(seconds * 1000, 3))
    if 0 < total_ms < 1000:
        return f"{total_ms}ms"
    minutes, rest_ms = divmod(total_ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{rest_ms / 1000:g}s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text


def _share_left(standing: Standing) -> float:
    # A limit may have an amount of 0.
    return standing.remaining / max(1, standing.limit.amount)


def _scope(standing: Standing) -> str:
    return f"{standing.limit.metric};{standing.limit.scope}"


def _name(standing: Standing) -> str:
    return f'"{standing.limit.metric}-{standing.limit.scope}"'


def _policy(standing: Standing) -> str:
    window = "" if standing.limit.metric == "concurrency" else f";w={_WINDOW_S}"
    return f"{_name(standing)};q={standing.limit.amount}{window}"


def _state(standing: Standing) -> str:
    return f"{_name(standing)};r={standing.remaining};t={math.ceil(standing.reset_ms / 1000)}"
