"""The prefix cache keeps whole prefixes, shares them only as allowed, and evicts leaves first."""

from collections import Counter

from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import data, integers, lists, text

from engine.kv.block_hash import BlockHasher
from engine.kv.blocks import BlockPool
from engine.steps.batch import BAD_LOGITS, StepTokens
from lora.arena import Arena
from lora.eviction import EVERYBODY, Claim
from tests.engine.fakes import (
    FakeRunner,
    expected_tokens,
    make_adapter,
    make_core,
    make_message,
    make_scheduler,
    run_until_idle,
    update,
)

PROMPT = [1 + i % 7 for i in range(70)]


def served(core, message):
    """Run a request alone to its end and return its last output."""
    core.handle("gw", message)
    return run_until_idle(core)[message.request_id][-1]


# ---- hits ----


def test_a_second_request_begins_after_the_blocks_that_it_shares(tmp_path):
    core = make_core(tmp_path)
    first = served(core, make_message("r1", prompt=PROMPT))
    second = served(core, make_message("r2", prompt=[*PROMPT[:40], 9, 9, 9]))
    assert first.num_cached_tokens == 0
    assert (second.num_cached_tokens, second.num_prompt_tokens) == (32, 43)


def test_generated_tokens_are_found_by_the_next_turn_of_a_chat(tmp_path):
    core = make_core(tmp_path)
    turn = make_message("r1", prompt=PROMPT[:20], max_tokens=30)
    served(core, turn)
    history = [*PROMPT[:20], *expected_tokens(turn)]
    # The last of 50 tokens was sampled but never computed, so three whole blocks are cached.
    assert served(core, make_message("r2", prompt=[*history, 5])).num_cached_tokens == 48


def test_the_last_token_is_computed_even_if_everything_is_cached(tmp_path):
    core = make_core(tmp_path)
    served(core, make_message("r1", prompt=PROMPT[:32]))
    assert served(core, make_message("r2", prompt=PROMPT[:32])).num_cached_tokens == 16


def test_requests_at_the_same_time_come_to_share_their_blocks():
    scheduler, runner = make_scheduler(max_num_batched_tokens=256), FakeRunner()
    for name in ("r1", "r2"):
        scheduler.add("gw", make_message(name, prompt=PROMPT))
    batch = scheduler.schedule()
    update(scheduler, batch, runner.run(batch))
    one, other = scheduler.queues.running
    assert one.block_ids[:4] == other.block_ids[:4]
    assert one.block_ids[4] != other.block_ids[4]
    scheduler.check_integrity()


def test_idle_blocks_are_kept_for_those_who_can_use_them(tmp_path):
    """PROMPT has four whole blocks: two are public, two count against the tenant's share."""
    core = make_core(tmp_path, public_prefixes=(tuple(PROMPT[:40]),))
    served(core, make_message("r1", prompt=PROMPT, max_tokens=1))
    idle = core.scheduler.arena.idle
    assert (idle.num_slabs_of(EVERYBODY), idle.num_slabs_of("t1")) == (2, 2)
    served(core, make_message("r2", prompt=PROMPT, max_tokens=1, adapter=make_adapter()))
    assert (idle.num_slabs_of(EVERYBODY), idle.num_slabs_of("t1")) == (2, 2 + 4 + 1)


def test_kv_of_an_adapter_that_is_evicted_goes_first(tmp_path):
    core = make_core(tmp_path, num_slabs=16)
    adapter = make_adapter()
    served(core, make_message("r1", prompt=PROMPT, max_tokens=1))
    served(core, make_message("r2", prompt=PROMPT, max_tokens=1, adapter=adapter))
    arena = core.scheduler.arena
    arena.idle.take(adapter.object_key)
    core.adapters.machine.evict(adapter.object_key)
    assert arena.make_room(arena.num_free + 4)
    assert served(core, make_message("r3", prompt=PROMPT)).num_cached_tokens == 64
    assert served(core, make_message("r4", prompt=PROMPT, adapter=adapter)).num_cached_tokens == 0


def test_a_public_prefix_is_shared_on_the_base_model_and_no_further(tmp_path):
    core = make_core(tmp_path, public_prefixes=(tuple(PROMPT[:40]),))
    served(core, make_message("r1", prompt=PROMPT, cache_salt="s1"))
    assert served(core, make_message("r2", prompt=PROMPT, cache_salt="s2")).num_cached_tokens == 32
    adapter = make_adapter()
    for number, salt in enumerate(["s1", "s2"]):
        message = make_message(f"a{number}", prompt=PROMPT, cache_salt=salt, adapter=adapter)
        assert served(core, message).num_cached_tokens == 0


def test_without_prefix_caching_nothing_is_kept(tmp_path):
    core = make_core(tmp_path, prefix_caching=False)
    served(core, make_message("r1", prompt=PROMPT))
    assert served(core, make_message("r2", prompt=PROMPT)).num_cached_tokens == 0
    assert core.scheduler.arena.num_free == core.scheduler.arena.num_slabs


def test_what_is_not_finite_is_never_found():
    scheduler = make_scheduler()
    scheduler.add("gw", make_message("r1", prompt=PROMPT[:40]))
    update(scheduler, scheduler.schedule(), StepTokens([BAD_LOGITS]))
    scheduler.add("gw", make_message("r2", prompt=PROMPT[:40]))
    assert scheduler.schedule().rows[0].start == 0


def test_of_n_answers_one_computes_the_prompt(tmp_path):
    core = make_core(tmp_path, max_num_batched_tokens=256)
    message = make_message("r1", prompt=PROMPT, n=4, max_tokens=3)
    core.handle("gw", message)
    run_until_idle(core)
    # One answer computes the prompt; the other three the 6 tokens after its last whole block.
    assert core.runner.meter.prompt_tokens == 70 + 3 * 6


# ---- hashes ----


@given(lists(integers(1, 9), min_size=32, max_size=32), text(max_size=5), text(max_size=5))
@settings(max_examples=30, deadline=None)
def test_hashes_differ_wherever_digest_salt_or_an_earlier_token_does(tokens, salt, name):
    hasher = BlockHasher(16)

    def hashes(prompt, salt, adapter):
        scope = hasher.scope(salt, adapter and adapter.digest)
        first = hasher.hash(b"", scope, False, prompt[:16])
        return first, hasher.hash(first, scope, False, prompt[16:])

    changed = [tokens[0] + 1, *tokens[1:]]
    one, adapter = hashes(tokens, salt, None), make_adapter(name)
    assert one == hashes(tokens, salt, None)
    others = [hashes(changed, salt, None), hashes(tokens, salt + "x", None)]
    assert len({one, *others, hashes(tokens, salt, adapter)}) == 4
    assert one[1] != hashes(changed, salt, None)[1]
    # A salt equal to a digest does not act as an adapter.
    assert hashes(tokens, "", adapter) != hashes(tokens, adapter.digest, None)


def test_kv_of_another_base_model_is_never_found():
    """The hashes of a request's own blocks, its base-model blocks and public blocks all differ."""
    one, other = (BlockHasher(16, base_revision=base) for base in ("base-1", "base-2"))
    for digest in (None, "d"):
        assert one.scope("s", digest) != other.scope("s", digest)
    public = (b"", b"", True, PROMPT[:16])
    assert one.hash(*public) != other.hash(*public)


# ---- the pool ----

CLAIM = Claim("t")


def test_a_prefix_that_was_found_stays_longer():
    arena = Arena(3)
    pool = BlockPool(arena)
    for tag in (b"a", b"b", b"c"):
        (block_id,) = pool.allocate(1)
        pool.publish(block_id, tag)
        pool.release([block_id], CLAIM, 1.0)
        if tag == b"a":
            pool.take([block_id])
            pool.release([block_id], CLAIM, 1.0)
    assert arena.make_room(2)
    assert pool.find([b"a"])


class PoolMachine(RuleBasedStateMachine):
    """Sequences of blocks over an alphabet of two, begun and ended as requests are."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(12)
        self.pool = BlockPool(self.arena)
        self.sequences: list[tuple[bytes, list[int]]] = []

    @rule(content=lists(integers(0, 1), min_size=1, max_size=5))
    def begin(self, content):
        """Begin a sequence: take its cached blocks, then compute and publish the rest."""
        hashes = [bytes(content[: i + 1]) for i in range(len(content))]
        blocks = self.pool.find(hashes)
        assert all(self.pool._blocks[b].hash == h for b, h in zip(blocks, hashes, strict=False))
        self.pool.take(blocks)
        if not self.arena.make_room(len(hashes) - len(blocks)):
            self.pool.release(blocks, CLAIM, 1.0)
            return
        num_found = len(blocks)
        blocks = blocks + self.pool.allocate(len(hashes) - num_found)
        for i in range(num_found, len(hashes)):
            self._publish(blocks, i, hashes[i])
        self.sequences.append((hashes[-1], blocks))

    @rule(content=lists(integers(0, 1), min_size=1, max_size=5))
    def compute_twice(self, content):
        """Compute cached blocks again, as a request does that starts in the step of its twin."""
        hashes = [bytes(content[: i + 1]) for i in range(len(content))]
        if not self.arena.make_room(len(hashes)):
            return
        blocks = self.pool.allocate(len(hashes))
        for i, block_hash in enumerate(hashes):
            self._publish(blocks, i, block_hash)
        self.sequences.append((hashes[-1], blocks))

    def _publish(self, blocks, i, block_hash):
        known = self.pool.publish(blocks[i], block_hash)
        if known != blocks[i]:
            self.pool.release([blocks[i]], CLAIM, 1.0)
            blocks[i] = known

    @precondition(lambda self: self.sequences)
    @rule(choice=data())
    def end(self, choice):
        number = choice.draw(integers(0, len(self.sequences) - 1))
        self.pool.release(self.sequences.pop(number)[1], CLAIM, 1.0)

    @rule(count=integers(1, 12))
    def make_room(self, count):
        held = len({b for _, blocks in self.sequences for b in blocks})
        assert self.arena.make_room(count) == (count <= 12 - held)

    @invariant()
    def what_is_known_is_whole_prefixes(self):
        """A cached block's prefix is cached too, so leaves are evicted first."""
        known = self.pool._by_hash
        assert all(len(content) == 1 or content[:-1] in known for content in known)

    @invariant()
    def blocks_are_free_exactly_when_unreferenced(self):
        self.arena.check_integrity()
        held = Counter(b for _, blocks in self.sequences for b in blocks)
        self.pool.check_integrity(held)
        assert self.arena.num_free + self.pool.num_idle == 12 - len(held)
        for content, blocks in self.sequences:
            hashes = [content[: i + 1] for i in range(len(content))]
            assert self.pool.find(hashes) == blocks


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
