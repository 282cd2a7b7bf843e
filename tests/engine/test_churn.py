"""No token comes from a wrong or stale adapter while adapters come and go, and guards are tested.

The loader, fetcher and store are real; of 200 adapters 20 have room (see tests.engine.churn).
"""

import pytest

from engine.kv.block_hash import BlockHasher
from lora.arena import Arena
from registry.storage.storage import LocalStorage
from tests.engine.churn import Churn, build_core
from tests.lora.factories import FetcherProcess

ALLOWED = {"max_tokens", "aborted", "adapter_missing"}


@pytest.fixture
def world(tmp_path):
    """A function that makes a `Churn` on a new engine, which `sabotage` may damage."""
    started = []

    def make(seed=1, sabotage=lambda core: None, **options):
        objects = tmp_path / "objects"
        # The quota holds half of the packed adapters, so that the disk cache evicts, too.
        fetcher = FetcherProcess(tmp_path, objects.as_uri(), quota_bytes=100 * (80 << 10))
        started.append(fetcher)
        (tmp_path / "engine").mkdir()
        core = build_core(tmp_path / "engine", fetcher.cache, fetcher.path, **options)
        sabotage(core)
        return Churn(core, LocalStorage(objects), tmp_path, seed)

    yield make
    for fetcher in started:
        fetcher.kill()


def check(churn, num_requests, deadline_s):
    churn.run(num_requests, deadline_s)
    assert not churn.wrong
    assert set(churn.outcomes) <= ALLOWED
    assert churn.outcomes["max_tokens"] > 0.8 * num_requests
    # Each event that could cause a wrong token has occurred.
    core = churn.core
    assert core.adapters.machine.num_evictions > num_requests / 10
    assert core.scheduler.queues.num_preemptions > 0
    assert core.num_cached_tokens > 0
    assert churn.outcomes["aborted"] > 0


@pytest.mark.parametrize("arena_is_host", [True, False])
def test_no_token_comes_from_a_wrong_or_stale_adapter(world, arena_is_host):
    check(world(seed=2, arena_is_host=arena_is_host), 400, deadline_s=120)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arena_is_host", [True, False])
def test_not_one_of_20_000_requests_meets_a_wrong_or_stale_adapter(world, arena_is_host):
    check(world(seed=3, arena_is_host=arena_is_host), 20_000, deadline_s=1500)


# ---- wrong tokens are detected when a guard is removed ----


class UnfencedArena(Arena):
    """An arena that hands out slabs at once though a running step still reads them."""

    def retire(self, slabs):
        self._fence_step = self._finished_step
        super().retire(slabs)
        self._fence_step = self._launched_step


def test_a_missing_fence_is_found_out(world):
    churn = world(arena=UnfencedArena(84))
    churn.run(3000, deadline_s=120)
    assert churn.wrong


class NamelessHasher(BlockHasher):
    """Hashes blocks by tokens and tenant but not by the adapter that computed them."""

    def scope(self, salt, digest):
        return super().scope(salt, None)


def test_a_block_hash_without_the_digest_is_found_out(world):
    def sabotage(core):
        hasher = NamelessHasher(core.scheduler.layout.block_size)
        core.scheduler.hasher = core.scheduler.kv.hasher = hasher

    churn = world(sabotage=sabotage)
    churn.run(3000, deadline_s=120)
    assert churn.wrong
