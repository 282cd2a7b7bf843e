"""Load shedding: requests that may wait, and requests that are refused at once."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.wire.messages import Priority
from registry.errors import Fault
from server.api.errors import answer_of
from server.inference.load_shedding import LoadShedder
from server.pool.running import Running, RunningRequest
from tests.server.factories import Clock


@dataclass
class Caller:
    tenant_id: str = "ten_1"
    max_queue_share: float | None = None


class World:
    """A load shedder whose clock the tests move."""

    def __init__(self, max_queued: int = 100, *, takes_turns: bool = True, serves_in_s: float = 0):
        """serves_in_s: how long each of eight requests took before; 0 if there were none."""
        self.clock = Clock()
        self.running = Running()
        self.load = LoadShedder(
            self.running, clock=self.clock, max_queued=lambda: max_queued, max_wait_s=5.0,
            default_share=1.0, takes_turns=takes_turns,
        )  # fmt: skip
        self.count = 0
        for _ in range(8 if serves_in_s else 0):
            self.serve(self.add(), serves_in_s)

    def add(self, tenant_id: str = "ten_1", *, is_cold: bool = False) -> RunningRequest:
        self.count += 1
        request = RunningRequest(f"r{self.count}", tenant_id, 1, 10, is_cold)
        self.load.add(request)
        return request

    def serve(self, request: RunningRequest, after_s: float) -> None:
        """Give a request its first token after `after_s` and end it."""
        self.clock.now += after_s
        self.load.begin(request, 0)
        self.load.remove(request)

    def refusal(
        self,
        caller: Caller | None = None,
        priority: Priority = Priority.INTERACTIVE,
        num_answers: int = 1,
    ) -> Fault | None:
        try:
            self.load.check(caller or Caller(), priority, num_answers)
        except Fault as error:
            return error
        return None


def test_nobody_is_shed_while_nothing_is_known_of_the_speed() -> None:
    world = World(max_queued=10)
    for _ in range(9):
        world.add()
    world.clock.now += 1000
    assert world.refusal() is None


def test_who_would_wait_longer_than_for_a_first_token_is_refused_at_once() -> None:
    world = World(serves_in_s=1.0)
    for _ in range(4):
        world.add()
    assert world.refusal() is None, "the fifth waits five seconds, which is just in time"
    world.add()
    refused = world.refusal()
    assert refused is not None
    told = answer_of(refused)
    assert (told.status, told.error["type"]) == (503, "overloaded_error")
    assert told.headers["retry-after"] == "1"


def test_the_tenant_with_the_long_queue_is_refused_and_another_is_not() -> None:
    world = World(serves_in_s=1.0)
    for _ in range(30):
        world.add("greedy")
    assert world.refusal(Caller("greedy")) is not None
    assert world.refusal(Caller("good")) is None, "one of the other's answers begins before"
    assert world.load.explain(Caller("good"))["expected_wait_s"] == pytest.approx(2.0, rel=0.01)


def test_where_the_first_to_come_is_served_first_everybody_waits_behind_the_long_queue() -> None:
    world = World(takes_turns=False, serves_in_s=1.0)
    for _ in range(30):
        world.add("greedy")
    assert world.refusal(Caller("good")) is not None


@given(st.lists(st.sampled_from("abcd"), max_size=200), st.sampled_from([0.25, 0.5, 0.8]))
def test_whatever_some_tenants_queue_there_is_room_for_a_newcomer(
    senders: list[str], share: float
) -> None:
    world = World(max_queued=64)
    for tenant_id in senders:
        if world.refusal(Caller(tenant_id, share)) is None:
            world.add(tenant_id)
    taken = world.running.num_waiting_of_all
    assert 64 - taken >= max(1, int(64 * (1 - share) ** 4))


def test_requests_that_can_wait_are_shed_first() -> None:
    world = World(serves_in_s=1.0)
    world.add()
    world.add()
    assert world.refusal(priority=Priority.INTERACTIVE) is None
    assert world.refusal(priority=Priority.BATCH) is not None


def test_an_idle_hour_is_no_slow_hour() -> None:
    world = World()
    for _ in range(8):
        world.clock.now += 3600
        world.serve(world.add(), after_s=0.1)
    assert world.load.wait_s(10) == pytest.approx(1.0, rel=0.01)


def test_the_wait_for_a_list_of_prompts_is_that_of_its_answers() -> None:
    world = World(serves_in_s=0.1)
    listed = RunningRequest("list", "ten_1", 20, 10, is_cold=False)
    world.load.add(listed)
    refused = world.refusal(Caller(max_queue_share=0.1))
    assert refused is not None
    assert float(answer_of(refused).headers["retry-after-ms"]) == pytest.approx(2000, rel=0.01)
    for index in range(20):
        world.clock.now += 0.1
        world.load.begin(listed, index)
    assert world.load.wait_s(10) == pytest.approx(1.0, rel=0.01)


def test_waiting_for_an_adapter_is_in_nobodys_way() -> None:
    world = World(serves_in_s=0.1)
    cold = [world.add("ten_2", is_cold=True) for _ in range(50)]
    world.clock.now += 60
    assert world.refusal() is None
    for request in cold:
        world.serve(request, after_s=0.0)
    assert world.load.wait_s(10) == pytest.approx(1.0, rel=0.01)


def test_a_tenant_has_a_share_of_the_queue_and_others_the_rest() -> None:
    world = World(max_queued=8)
    share = Caller(max_queue_share=0.25)
    begun = world.add()
    world.add()
    refused = world.refusal(share)
    assert refused is not None
    told = answer_of(refused)
    assert (told.status, told.headers["x-ratelimit-scope"]) == (429, "queue;tenant")
    assert world.refusal(Caller("ten_2", 0.25)) is None
    world.load.begin(begun, 0)
    assert world.refusal(share) is None, "a request that has begun no longer waits"


def test_the_smallest_share_is_one_request() -> None:
    world = World(max_queued=8)
    assert world.refusal(Caller(max_queue_share=0.01)) is None
    world.add()
    assert world.refusal(Caller(max_queue_share=0.01)) is not None


def test_a_list_of_prompts_takes_as_much_of_a_share_as_it_has_answers() -> None:
    world = World(max_queued=8)
    share = Caller(max_queue_share=0.5)
    assert world.refusal(share, num_answers=20) is None, "an idle queue takes any request"
    request = RunningRequest("list", "ten_1", 3, 10, is_cold=False)
    world.load.add(request)
    assert world.refusal(share) is None
    assert world.refusal(share, num_answers=2) is not None
    world.load.begin(request, 2)
    world.load.begin(request, 2)
    assert world.refusal(share, num_answers=2) is None
    world.load.remove(request)
    assert world.running.num_waiting("ten_1") == 0


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "cold", "begin", "remove"]), st.integers(0, 5)),
        max_size=40,
    )
)
def test_the_counts_are_those_of_the_requests_there_are(steps: list[tuple[str, int]]) -> None:
    running = Running()
    requests: list[RunningRequest] = []
    removed: set[str] = set()
    for number, (what, which) in enumerate(steps):
        if what in ("add", "cold"):
            request = RunningRequest(
                f"r{number}",
                f"ten_{which % 2}",
                1 + which,
                1,
                what == "cold",
                engine=f"{which % 3}",
            )
            requests.append(request)
            running.add(request)
        elif which < len(requests):
            request = requests[which]
            if what == "begin" and request.request_id not in removed:
                running.begin(request, number % request.num_answers)
            elif what == "remove":
                removed.add(request.request_id)
                running.remove(request)
        there = [r for r in requests if r.request_id not in removed]
        assert sorted(running) == sorted(r.request_id for r in there)
        left = [r.num_answers - len(r.begun) for r in there if not r.is_cold]
        assert running.num_queued == sum(left)
        for request in requests:
            assert (running.find(request.request_id) is not None) == (request in there)
        for engine in "012":
            at_engine = [r.num_answers for r in there if r.engine == engine]
            assert running.num_at(engine) == sum(at_engine)
        for tenant in ("ten_0", "ten_1"):
            left = [r.num_answers - len(r.begun) for r in there if r.tenant_id == tenant]
            assert running.num_waiting(tenant) == sum(left)
