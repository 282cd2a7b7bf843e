"""KV blocks: which requests use them, and how full ones are found again by their contents.

A block that is full and computed is *published* under a hash of everything that its keys and values
depend on. It may then serve any request whose tokens, adapter and scope agree up to its end. A
published block without users stays idle until the arena needs room. Leaves are evicted first, so
that a look-up always finds a whole prefix.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lora.arena import Arena
from lora.eviction import Claim, Key

_OWNER = "kv"


@dataclass(slots=True)
class _Block:
    """State of a block. users: requests that hold it.   hits: requests that found it by its hash.

    hash: None until the block is published.
    """

    users: int = 1
    hits: int = 0
    hash: bytes | None = None


class BlockPool:
    """Every KV block of the arena, by slab; `Arena.make_room` evicts idle ones.

    Leaves are evicted first: a request that finds a block also finds those before it, and
    releases them after it. So a block is worth at least as much as each block of the same tenant
    that follows it, and if they are worth the same, it has been idle for less time.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.num_evictions = 0
        self._blocks: dict[int, _Block] = {}
        self._by_hash: dict[bytes, int] = {}
        self.num_idle = 0

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate empty blocks with one user each. Raises ArenaFull."""
        block_ids = self.arena.allocate(num_blocks, _OWNER)
        self._blocks.update((block_id, _Block()) for block_id in block_ids)
        return block_ids

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Find the published blocks of the longest known prefix of `hashes`; none is taken yet."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def take(self, block_ids: Sequence[int]) -> None:
        """Add a user to each block."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.users == 0:
                self.arena.idle.take(block_id)
                self.num_idle -= 1
            block.users += 1
            block.hits += 1

    def is_shared(self, block_id: int) -> bool:
        return self._blocks[block_id].users > 1

    def release(self, block_ids: Sequence[int], claim: Claim, reload_s: float) -> None:
        """Remove a user from each block. One without users is idle if published, else retired.

        claim: for whom idle blocks are kept.   reload_s: seconds to compute a block again.
        """
        retired: list[int] = []
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.users > 0, "released more often than taken"
            block.users -= 1
            if block.users == 0 and block.hash is None:
                del self._blocks[block_id]
                retired.append(block_id)
            elif block.users == 0:
                self.num_idle += 1
                self.arena.idle.add(
                    self, block_id, claim, num_slabs=1, num_hits=block.hits, reload_s=reload_s
                )
        self.arena.retire(retired)

    def publish(self, block_id: int, block_hash: bytes) -> int:
        """Let a full, computed block be found by its hash; return the block to use from now on.

        If a block of this hash was published before, that one is taken and returned instead, since
        one copy is enough.
        """
        known = self._by_hash.setdefault(block_hash, block_id)
        if known != block_id:
            self.take([known])
            return known
        assert self._blocks[block_id].hash is None, "published twice"
        self._blocks[block_id].hash = block_hash
        return block_id

    def evict(self, key: Key) -> None:
        """Evict an idle block; see lora.eviction.Source."""
        assert isinstance(key, int)
        block = self._blocks.pop(key)
        assert block.hash is not None
        del self._by_hash[block.hash]
        self.num_idle -= 1
        self.num_evictions += 1
        self.arena.retire([key])

    def check_integrity(self, held: Counter[int]) -> None:
        """Assert that all counts agree. held: how many requests hold each block."""
        assert self.arena.owned_by(_OWNER) == len(self._blocks)
        assert {b: block.users for b, block in self._blocks.items() if block.users} == held
        idle = [b for b, block in self._blocks.items() if not block.users]
        assert self.num_idle == len(idle)
        assert all(block_id in self.arena.idle for block_id in idle)
        published = {b.hash: i for i, b in self._blocks.items() if b.hash is not None}
        assert self._by_hash == published
