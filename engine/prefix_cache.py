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

_OWNER = "kv"


@dataclass(slots=True)
class _Block:
    """users: requests that hold it.   hash: None until published.

    used_at: when its last user left, by Arena.tick.
    """

    users: int = 1
    hash: bytes | None = None
    used_at: int = 0


class BlockPool:
    """Every KV block of the arena, by slab. What is idle here is evicted through `Arena.make_room`.

    Least recently used first is leaves first: who holds a block holds those before it and gives
    them back after it, so a block is never used less recently than one that follows it.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.num_evictions = 0
        self._blocks: dict[int, _Block] = {}
        self._by_hash: dict[bytes, int] = {}
        self._idle: dict[int, None] = {}  # least recently used first
        arena.keep(self)

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
            self._idle.pop(block_id, None)
            self._blocks[block_id].users += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One user less for each; a block without users is idle if published, else retired."""
        retired: list[int] = []
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.users > 0, "released more often than taken"
            block.users -= 1
            if block.users == 0 and block.hash is None:
                del self._blocks[block_id]
                retired.append(block_id)
            elif block.users == 0:
                block.used_at = self.arena.tick()
                self._idle[block_id] = None
        self.arena.retire(retired)

    def publish(self, block_id: int, block_hash: bytes) -> int:
        """Let a full, computed block be found; the block to use from now on.

        That is another one where the same was published before: then this one is released for it.
        """
        if (known := self._by_hash.get(block_hash)) is not None:
            if known != block_id:
                self.take([known])
                self.release([block_id])
            return known
        block = self._blocks[block_id]
        assert block.hash is None, "published twice"
        block.hash = block_hash
        self._by_hash[block_hash] = block_id
        return block_id

    # ---- see lora.arena.Idle ----

    def num_idle_slabs(self) -> int:
        return len(self._idle)

    def coldest(self) -> int | None:
        return next((self._blocks[block_id].used_at for block_id in self._idle), None)

    def evict_coldest(self) -> None:
        block_id = next(iter(self._idle))
        del self._idle[block_id]
        block = self._blocks.pop(block_id)
        assert block.hash is not None
        del self._by_hash[block.hash]
        self.num_evictions += 1
        self.arena.retire([block_id])

    def check_integrity(self, held: Counter[int]) -> None:
        """held: how many requests hold each block."""
        assert self.arena.owned_by(_OWNER) == len(self._blocks)
        assert {b: block.users for b, block in self._blocks.items() if block.users} == held
        assert self._idle.keys() == {b for b, block in self._blocks.items() if not block.users}
        ages = [self._blocks[block_id].used_at for block_id in self._idle]
        assert ages == sorted(ages)
        published = {b.hash: i for i, b in self._blocks.items() if b.hash is not None}
        assert self._by_hash == published
