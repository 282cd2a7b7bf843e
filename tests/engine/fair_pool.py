"""Several real schedulers that exchange service totals over a simulated, possibly bad network, and
the service of tenants counted from the steps.
"""

import random
from collections import deque
from dataclasses import dataclass

from engine.scheduling.fairness import DECODE_COST, PREFILL_COST
from engine.wire.messages import TenantService
from tests.engine.fakes import (
    FakeClock,
    FakeRunner,
    make_message,
    make_scheduler,
    tokens_for,
    update,
)

STEP_S = 0.01


class Service:
    """Service of each tenant divided by its weight, counted from the steps."""

    def __init__(self, weights):
        self.weights = weights
        self.given = dict.fromkeys(weights, 0.0)
        self.computed = {}  # prompt tokens of each request so far

    def count(self, batch, scheduler):
        for row in batch.rows:
            message = scheduler.groups[row.request_id].message
            end = min(row.start + len(row.token_ids), len(message.prompt_token_ids))
            before = self.computed.get(row.request_id, 0)
            self.computed[row.request_id] = max(before, end)
            service = PREFILL_COST * max(end - before, 0) + DECODE_COST * bool(row.sampling)
            self.given[message.tenant_id] += service / self.weights[message.tenant_id]


class Steps:
    """A scheduler with a fake runner `lag` steps behind it.   service: counts the steps' tokens."""

    def __init__(self, scheduler, lag=0, service=None):
        self.scheduler, self.service = scheduler, service
        self.runner = FakeRunner(lag=lag)
        self.launched = []

    def step(self):
        """Take a step, and return it."""
        batch = self.scheduler.schedule()
        if self.service:
            self.service.count(batch, self.scheduler)
        if not batch.is_empty:
            self.runner.launch(batch)
            self.launched.append(batch)
        if len(self.launched) > self.runner.lag or (self.launched and batch.is_empty):
            update(self.scheduler, self.launched.pop(0), self.runner.collect())
        return batch


class Network:
    """Delivers every message at once, or, with a seed, loses, delays and repeats messages.

    A link loses at most three messages in a row, delays a message by at most three exchanges and
    delivers some twice, so a receiver knows the state of `max_age` exchanges ago.
    """

    def __init__(self, seed=None):
        self.chance = None if seed is None else random.Random(seed)
        self.max_age = 1 if seed is None else 8
        self.under_way = []  # (exchange in which it arrives, receiver, message)
        self.num_lost = {}  # messages lost in a row, by sender and receiver

    def send(self, now, receiver, message):
        if self.chance is None:
            self.under_way.append((now, receiver, message))
            return
        link = (message.engine_id, receiver)
        lost = self.num_lost.get(link, 0)
        is_lost = lost < 3 and self.chance.random() < 0.4
        self.num_lost[link] = lost + 1 if is_lost else 0
        for _ in range(0 if is_lost else self.chance.randint(1, 2)):
            self.under_way.append((now + self.chance.randint(0, 3), receiver, message))

    def arrivals(self, now):
        arrived = [item for item in self.under_way if item[0] <= now]
        self.under_way = [item for item in self.under_way if item[0] > now]
        if self.chance:
            self.chance.shuffle(arrived)
        return [(receiver, message) for _, receiver, message in arrived]


@dataclass
class Demand:
    """A tenant that always has waiting requests of one shape at some of the engines."""

    engines: tuple[int, ...]
    weight: float = 1.0
    prompt_len: int = 8
    max_tokens: int = 6


class FairPool:
    """Engines that take steps one after the other, in rounds.

    every: steps between two exchanges; 0 disables exchanges.
    """

    def __init__(self, num_engines, demands, every=5, network=None, **limits):
        self.clock = FakeClock()
        defaults = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "prefix_caching": False}
        self.engines = [
            make_scheduler(64, clock=self.clock, scheduling_policy="vtc", **(defaults | limits))
            for _ in range(num_engines)
        ]
        self.demands = demands
        self.every = every
        self.network = network or Network()
        self.service = Service({tenant: demand.weight for tenant, demand in demands.items()})
        self.num_requests = self.num_steps = 0
        self._totals = deque([0.0], (every or 1) * self.network.max_age + 1)
        self.most_between = 0.0

    def run(self, num_steps, check=lambda: None):
        for _ in range(num_steps):
            self.step()
            check()

    def step(self):
        self.clock.now += STEP_S
        self.num_steps += 1
        for number, scheduler in enumerate(self.engines):
            self._feed(number, scheduler)
            batch = scheduler.schedule()
            self.service.count(batch, scheduler)
            assert not self._has_empty_seat(scheduler), "a request waits beside an empty seat"
            update(scheduler, batch, tokens_for(batch))
        if self.every and self.num_steps % self.every == 0:
            self._exchange(self.num_steps // self.every)
        self._totals.append(sum(self.service.given.values()))
        self.most_between = max(self.most_between, self._totals[-1] - self._totals[0])

    @property
    def bound(self):
        """Bound on the difference between two tenants: the sum of the engines' bounds (theorem 4.4
        of arXiv 2401.00588, for the tokens that their seats hold) and the most service given within
        the age of a message.
        """
        longest = max(d.prompt_len + d.max_tokens for d in self.demands.values())
        seats = self.engines[0].config.max_num_seqs
        most = max(PREFILL_COST * longest, DECODE_COST * seats * longest)
        lightest = min(demand.weight for demand in self.demands.values())
        return len(self.engines) * 2 * most / lightest + self.most_between

    def _feed(self, number, scheduler):
        waiting = [request.tenant_id for request in scheduler.queues.waiting]
        for tenant, demand in self.demands.items():
            if number in demand.engines:
                for _ in range(3 - waiting.count(tenant)):
                    self.num_requests += 1
                    message = make_message(
                        f"r{self.num_requests}", demand.prompt_len, demand.max_tokens,
                        tenant_id=tenant, weight=demand.weight, deadline_s=1e9,
                        first_token_timeout_s=1e9,
                    )  # fmt: skip
                    scheduler.add("gw", message)

    @staticmethod
    def _has_empty_seat(scheduler):
        queues = scheduler.queues
        has_seat = len(queues.running) < scheduler.config.max_num_seqs
        return bool(has_seat and queues.plan.budget > 0 and queues.waiting)

    def _exchange(self, now):
        for number, sender in enumerate(self.engines):
            if totals := sender.policy.take_service():
                message = TenantService(engine_id=f"eng-{number}", epoch=1, totals=totals)
                for receiver in range(len(self.engines)):
                    if receiver != number:
                        self.network.send(now, receiver, message)
        for receiver, message in self.network.arrivals(now):
            self.engines[receiver].policy.note_elsewhere(message)
