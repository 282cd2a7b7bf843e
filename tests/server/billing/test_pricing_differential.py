"""A second implementation of the price list, in Decimal dollars and from its text, agrees.

The text: prices are dollars for a million tokens, and dollars for a GB (10^9 bytes) and hour. A
prompt's tokens are either cached or not, and are paid at one price or the other. Generated tokens
have a third price. A request that ended in an error of the server is counted and free, whatever it
generated, and so is a request that its gateway answered with an error. A client that hangs up, or
runs into a deadline, pays for the generated tokens, but a request that generated none because of
its deadline is free. Kept bytes are paid to the nearest nano-dollar, half of one counting as one.
"""

import random
import sys
from decimal import ROUND_HALF_UP, Decimal
from typing import get_args

import pytest

from engine.wire.messages import FinishReason, StopCause
from server.billing.rating import TokenPrices, format_usd, kept_amount, rated_amounts
from tests.server.factories import make_end

MILLION = Decimal(10**6)
NANO = Decimal(1).scaleb(-9)

# Causes are listed by hand, so that a new cause has to be considered here as well.
PAID = {
    "eos", "stop_string", "stop_token", "max_tokens", "max_model_len", "budget", "aborted",
    "constraint_too_slow",
}  # fmt: skip
LATE = {"deadline", "first_token_timeout"}
BROKEN = {
    "engine_failure", "gateway_lost", "adapter_loading", "adapter_missing", "adapter_corrupt",
    "adapter_incompatible", "adapter_too_large", "adapter_not_invoked",
    "request_too_long",
}  # fmt: skip


def dollars_a_million(nanousd_a_token):
    return Decimal(nanousd_a_token) * MILLION / 10**9


def bill(reason, cause, prompt, cached, completion, price, is_failed):
    """Amounts for (prompt, cached, completion) in dollars."""
    is_free = is_failed or cause in BROKEN
    is_free = is_free or (cause in LATE and completion == 0)
    # Ends with an error are free, but for the deadline and grammars that were too slow.
    is_free = is_free or (reason == "error" and cause not in ("deadline", "constraint_too_slow"))
    if is_free:
        return Decimal(0), Decimal(0), Decimal(0)
    fresh = prompt - cached
    return (
        fresh * dollars_a_million(price.prompt_nanousd) / MILLION,
        cached * dollars_a_million(price.cached_nanousd) / MILLION,
        completion * dollars_a_million(price.completion_nanousd) / MILLION,
    )


def some(rng, limit):
    """A random number below the limit: often 0, often 1, else of any magnitude."""
    return rng.choice((0, 1, rng.randrange(limit), rng.randrange(1 + rng.randrange(limit))))


def check_tokens(rng):
    cause = rng.choice(get_args(StopCause))
    # Requests of an adapter that cannot be served always end with an error.
    is_error = cause.startswith("adapter_") or cause == "request_too_long"
    reason = "error" if is_error else rng.choice(get_args(FinishReason))
    prompt = some(rng, 2_000_000)
    cached = rng.choice((0, prompt, rng.randint(0, prompt)))
    completion = some(rng, 200_000)
    names = ("prompt_nanousd", "cached_nanousd", "completion_nanousd")
    price = TokenPrices(**{name: some(rng, 10**12) for name in names})
    is_failed = rng.random() < 0.1
    ours = rated_amounts(reason, cause, prompt, cached, completion, price, is_failed=is_failed)
    theirs = bill(reason, cause, prompt, cached, completion, price, is_failed)
    asked = (reason, cause, prompt, cached, completion, price, is_failed)
    assert tuple(part * NANO for part in (ours.prompt, ours.cached, ours.completion)) == theirs, (
        asked
    )
    assert Decimal(format_usd(ours.total)) == sum(theirs), asked
    # One token less in the cache moves it from one price to the other and changes nothing else.
    if sum(theirs) and cached:
        less = rated_amounts(reason, cause, prompt, cached - 1, completion, price).total
        assert ours.total - less == price.cached_nanousd - price.prompt_nanousd, asked


def check_kept(rng):
    size_bytes, duration_ms = some(rng, 2**40), some(rng, 86_400_001)
    price = some(rng, 10**12)
    exact = Decimal(size_bytes) * duration_ms * price / (Decimal(10**9) * 3_600_000)
    expected = int(exact.quantize(Decimal(1), rounding=ROUND_HALF_UP))
    assert kept_amount(size_bytes, duration_ms, price) == expected, (size_bytes, duration_ms, price)


def sweep(seed, count):
    rng = random.Random(seed)
    print(f"seed {seed}")  # noqa: T201
    for _ in range(count):
        check_tokens(rng)
        if rng.random() < 0.2:
            check_kept(rng)


def test_the_words_name_every_way_that_a_request_ends():
    assert set(get_args(StopCause)) == PAID | LATE | BROKEN
    assert make_end(1).stop_cause in PAID


def test_five_thousand_random_usages_cost_what_the_words_say():
    sweep(1, 5_000)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_million_random_usages_cost_what_the_words_say():
    seed = random.SystemRandom().randrange(2**32)
    sys.stdout.write(f"seed {seed}\n")  # shown if the test fails
    sweep(seed, 1_000_000)


@pytest.mark.parametrize(("half", "expected"), [(1, 1), (3, 2), (5, 3)])
def test_half_a_nanodollar_is_a_whole_one(half, expected):
    """The amounts are for half a GB for an hour at 1, 3 and 5 nano-dollars."""
    assert kept_amount(5 * 10**8, 3_600_000, half) == expected
