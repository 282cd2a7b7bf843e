"""The limits script on a real Redis, at times that the tests set."""

from hypothesis import example, given, settings
from hypothesis.stateful import run_state_machine_as_test

from server.limits.calls import Answer, Call
from server.limits.redis_calls import SCRIPT
from tests.server.limiter_machine import (
    BORN_MS,
    LATE_REFUNDS,
    LimiterMachine,
    check_expiry,
    check_refunds,
    refunds,
)

PREFIX = "chorale:{test}"


class ScriptStates:
    """The script with the methods of `States`."""

    def __init__(self, client):
        self.client = client
        client.flushall()
        client.set(f"{PREFIX}:born", BORN_MS)

    def run(self, call, now_ms) -> Answer:
        keys, (command, _, *others) = call.keys(PREFIX), call.arguments()
        return call.read(self.client.eval(SCRIPT, len(keys), *keys, command, now_ms, *others))

    def acquire(self, call, now_ms):
        return list(self.run(call, now_ms).waits)

    check = acquire

    def release(self, grant, used_tokens, now_ms):
        self.run(Call("release", grant.limits, used_tokens, grant.request_id), now_ms)

    def standings(self, limits, now_ms, *, with_holders):
        return self.run(Call("standings", tuple(limits)), now_ms).standings


def test_the_script_is_the_models_step_by_step(redis_server):
    client = redis_server.client

    class ScriptMachine(LimiterMachine):
        def make_subject(self):
            return ScriptStates(client)

    steps = settings(max_examples=30, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(ScriptMachine, settings=steps)


def test_refunds_of_charges_that_are_open_together_are_the_models(redis_server):
    client = redis_server.client

    @settings(max_examples=100, deadline=None)
    @given(refunds)
    @example(LATE_REFUNDS)
    def check(script):
        check_refunds(ScriptStates(client), script)

    check()


def test_a_charge_expires_with_its_lease(redis_server):
    check_expiry(ScriptStates(redis_server.client))
