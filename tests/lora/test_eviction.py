"""Order of eviction: items that are worth least for their slabs go first, and no tenant within its
share loses any while another tenant is above its share.
"""

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import floats, integers, sampled_from

from lora.eviction import EVERYBODY, Claim, EvictionOrder


class Shelf:
    """A source that remembers the evicted keys."""

    def __init__(self):
        self.evicted = []

    def evict(self, key):
        self.evicted.append(key)


def put(order, shelf, key, tenant_id="t", *, slabs=1, hits=0, reload_s=1.0, weight=1.0, needs=None):
    claim = Claim(tenant_id, weight, needs)
    order.add(shelf, key, claim, num_slabs=slabs, num_hits=hits, reload_s=reload_s)


def evicted_in_turn(order, shelf):
    while order.num_slabs:
        order.evict(1)
    return shelf.evicted


def test_of_equals_the_one_that_became_idle_first_goes_first():
    order, shelf = EvictionOrder(), Shelf()
    for key in "abc":
        put(order, shelf, key)
    assert evicted_in_turn(order, shelf) == ["a", "b", "c"]


def test_what_was_found_more_often_costs_more_or_takes_fewer_slabs_stays_longer():
    order, shelf = EvictionOrder(), Shelf()
    put(order, shelf, "often", hits=3)
    put(order, shelf, "plain", hits=1)
    put(order, shelf, "dear", hits=1, reload_s=2.0)
    put(order, shelf, "large", hits=1, slabs=4)
    assert evicted_in_turn(order, shelf) == ["large", "plain", "dear", "often"]


def test_what_was_worth_much_once_goes_when_enough_others_have_come_and_gone():
    order, shelf = EvictionOrder(), Shelf()
    put(order, shelf, "old favourite", hits=1000)
    for number in range(2000):
        put(order, shelf, number, hits=1)
        put(order, shelf, -number - 1, hits=1)
        order.evict(2)
        if "old favourite" in shelf.evicted:
            break
    assert 4 < number < 100


def test_a_tenant_above_its_share_loses_its_own_first():
    order, shelf = EvictionOrder(), Shelf()
    put(order, shelf, "modest", "modest")
    for number in range(9):
        put(order, shelf, number, "greedy", hits=5)
    order.evict(1)
    assert shelf.evicted == [0], "no more than was asked for"
    order.evict(7)
    assert shelf.evicted == list(range(8))


def test_what_is_everybodys_counts_in_no_share_and_goes_by_its_worth():
    order, shelf = EvictionOrder(), Shelf()
    for number in range(4):
        put(order, shelf, f"cheap {number}", EVERYBODY)
        put(order, shelf, f"dear {number}", EVERYBODY, hits=3)
    put(order, shelf, "one", "a", hits=1)
    put(order, shelf, "other", "b", hits=1)
    order.evict(5)
    assert shelf.evicted[:4] == [f"cheap {number}" for number in range(4)]
    assert not {"dear 0", "dear 1"} & set(shelf.evicted)


def test_spare_slabs_go_before_all_items_the_newest_first_and_count_in_no_share():
    order, shelf = EvictionOrder(), Shelf()
    put(order, shelf, "worthless", hits=0, reload_s=0.0)
    for number in range(4):
        order.add_spare(shelf, number)
    order.take_spare(1)
    assert (order.num_slabs, order.num_spare, order.num_slabs_of("t")) == (4, 3, 1)
    order.evict(2)
    assert shelf.evicted == [3, 2]
    order.evict(1, spares=False)
    assert shelf.evicted == [3, 2, "worthless"]
    order.evict(1)
    assert shelf.evicted == [3, 2, "worthless", 0]
    order.check_integrity()


def test_kv_of_an_adapter_that_left_goes_first():
    order, shelf = EvictionOrder(), Shelf()
    put(order, shelf, "cheap")
    put(order, shelf, 1, needs="gone", hits=5)
    put(order, shelf, 2, needs="here", hits=5)
    order.adapter_left("gone")
    order.evict(1)
    assert shelf.evicted == [1]
    # A request used it with the adapter, so it has its full worth again.
    put(order, shelf, 1, needs="gone", hits=6)
    order.evict(1)
    assert shelf.evicted == [1, "cheap"]


def test_what_nobody_ever_comes_back_for_is_worth_less_by_and_by():
    """Prompts that are never seen twice must not evict adapters that are used again."""
    order, prompts, adapters = EvictionOrder(), Shelf(), Shelf()
    for number in range(600):
        put(order, prompts, number, reload_s=100.0)
        order.evict(1)
        put(order, adapters, f"a{number}", reload_s=1.0)
        order.take(f"a{number}")
    prompts.evicted.clear()
    put(order, adapters, "adapter", reload_s=1.0)
    for number in range(1000, 1010):
        put(order, prompts, number, reload_s=1.0)
        order.evict(1)
    assert adapters.evicted == []


class OrderMachine(RuleBasedStateMachine):
    """Three tenants and everybody put, take and evict."""

    def __init__(self):
        super().__init__()
        self.order = EvictionOrder()
        self.idle: dict[int, tuple[str, int]] = {}
        self.weights: dict[str, float] = {}
        self.number = 0

    def evict(self, key):
        """Called by the order, as its source. A tenant above its share loses, if there is one."""
        tenant_id, _ = self.idle[key]
        if tenant_id != EVERYBODY and self._above():
            assert tenant_id in self._above(), "a tenant within its share lost something"
        del self.idle[key]

    def _above(self):
        held = {}
        for tenant_id, slabs in self.idle.values():
            if tenant_id != EVERYBODY:
                held[tenant_id] = held.get(tenant_id, 0) + slabs
        total, weight = sum(held.values()), sum(self.weights[t] for t in held)
        return {t for t, n in held.items() if n * weight > self.weights[t] * total * (1 + 1e-12)}

    @rule(
        tenant=sampled_from(["a", "b", "c", EVERYBODY]),
        slabs=integers(1, 3),
        hits=integers(0, 3),
        reload_s=floats(0.001, 10),
        weight=sampled_from([0.5, 1.0, 4.0]),
        needs=sampled_from([None, "x", "y"]),
    )
    def put(self, tenant, slabs, hits, reload_s, weight, needs):
        self.number += 1
        self.weights[tenant] = weight
        self.idle[self.number] = (tenant, slabs)
        put(
            self.order, self, self.number, tenant,
            slabs=slabs, hits=hits, reload_s=reload_s, weight=weight, needs=needs,
        )  # fmt: skip

    @precondition(lambda self: self.idle)
    @rule(which=integers(0, 100))
    def take(self, which):
        key = sorted(self.idle)[which % len(self.idle)]
        del self.idle[key]
        self.order.take(key)

    @rule(adapter=sampled_from("xy"))
    def leave(self, adapter):
        self.order.adapter_left(adapter)

    @precondition(lambda self: self.idle)
    @rule(count=integers(1, 5))
    def make_room(self, count):
        before = self.order.num_slabs
        count = min(count, before)
        self.order.evict(count)
        assert self.order.num_slabs <= before - count

    @invariant()
    def counts_add_up(self):
        self.order.check_integrity()
        assert self.order.num_slabs == sum(slabs for _, slabs in self.idle.values())


TestOrderMachine = OrderMachine.TestCase
TestOrderMachine.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)
