"""KV blocks: who uses them, and which of them can be found again by what they hold.

A block that is full and computed is *published* under a hash of everything that its keys and values
depend on. It may then serve any request whose tokens, adapter and scope agree up to its end. A
published block that nobody uses stays, idle, until the arena needs room; leaves go first, so that
what is found is always a whole prefix.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lora.arena import Arena
from lora.eviction import Claim, Key

_OWNER = "kv"


@dataclass(slots=True)
class _Block:
    """users: requests that hold it.   hits: that found it.   hash: None until published."""

    users: int = 1
    hits: int = 0
    hash: bytes | None = None


class BlockPool:
    """Every KV block of the arena, by slab. What is idle here is evicted through `Arena.make_room`.

    Leaves go first: who finds a block finds those before it, and gives them back after it, so of
    one tenant's blocks none is worth less, or equal and older, than one that follows it.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.num_evictions = 0
        self._blocks: dict[int, _Block] = {}
        self._by_hash: dict[bytes, int] = {}
        self._num_idle = 0

    def allocate(self, num_blocks: int) -> list[int]:
        """Empty blocks with one user each. Raises ArenaFull."""
        block_ids = self.arena.allocate(num_blocks, _OWNER)
        self._blocks.update((block_id, _Block()) for block_id in block_ids)
        return block_ids

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The published blocks of the longest known prefix of `hashes`; nobody holds them yet."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def take(self, block_ids: Sequence[int]) -> None:
        """One more user for each."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.users == 0:
                self.arena.idle.take(block_id)
                self._num_idle -= 1
            block.users += 1
            block.hits += 1

    def release(self, block_ids: Sequence[int], claim: Claim, reload_s: float) -> None:
        """One user less for each; a block without users is idle if published, else retired.

        claim: for whom idle ones are kept.   reload_s: what computing one again would take.
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
                self._num_idle += 1
                self.arena.idle.add(
                    self, block_id, claim, num_slabs=1, num_hits=block.hits, reload_s=reload_s
                )
        self.arena.retire(retired)

    def publish(self, block_id: int, block_hash: bytes) -> int:
        """Let a full, computed block be found; the block to use from now on.

        That is another one, taken, where the same was published before: one copy is enough.
        """
        known = self._by_hash.setdefault(block_hash, block_id)
        if known != block_id:
            self.take([known])
            return known
        assert self._blocks[block_id].hash is None, "published twice"
        self._blocks[block_id].hash = block_hash
        return block_id

    @property
    def num_idle(self) -> int:
        return self._num_idle

    def evict(self, key: Key) -> None:
        """See lora.eviction.Source."""
        assert isinstance(key, int)
        block = self._blocks.pop(key)
        assert block.hash is not None
        del self._by_hash[block.hash]
        self._num_idle -= 1
        self.num_evictions += 1
        self.arena.retire([key])

    def check_integrity(self, held: Counter[int]) -> None:
        """held: how many requests hold each block."""
        assert self.arena.owned_by(_OWNER) == len(self._blocks)
        assert {b: block.users for b, block in self._blocks.items() if block.users} == held
        idle = [b for b, block in self._blocks.items() if not block.users]
        assert self._num_idle == len(idle)
        assert all(block_id in self.arena.idle for block_id in idle)
        published = {b.hash: i for i, b in self._blocks.items() if b.hash is not None}
        assert self._by_hash == published
