"""The KV blocks of requests: found in the prefix cache, allocated, published, swapped, returned."""

from collections import Counter
from collections.abc import Iterable

from engine.kv.block_hash import BlockHasher
from engine.kv.blocks import BlockPool
from engine.kv.swap import SwapSpace
from engine.requests.request import Request
from lora.arena import Arena
from lora.eviction import EVERYBODY, Claim
from lora.layout import Layout

_DEAD = -1


class KVCache:
    """Requests' KV blocks; `block_ids`, `swapped` and `num_computed_tokens` change together.

    sliding_window: most positions that a layer sees, None if a layer sees all. Blocks behind it are
    given back while the request runs, and are marked as dead in `block_ids`.
    """

    def __init__(
        self,
        arena: Arena,
        layout: Layout,
        hasher: BlockHasher,
        swap: SwapSpace,
        *,
        prefix_caching: bool,
        sliding_window: int | None = None,
    ) -> None:
        self.arena = arena
        self.layout = layout
        self.hasher = hasher
        self.pool = BlockPool(arena)
        self.swap = swap
        self.prefix_caching = prefix_caching
        self.sliding_window = sliding_window
        self.copies: list[tuple[int, int]] = []

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Take the copies, (from, to), that the next step has to run first."""
        copies, self.copies = self.copies, []
        return tuple(copies)

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Number of blocks to allocate before the next `num_tokens` can be computed."""
        end = request.num_computed_tokens + request.num_in_flight_tokens + num_tokens
        have = len(request.block_ids) or request.num_dead_blocks
        return max(0, self.layout.num_blocks(end) - have) + self._writes_to_shared(request)

    def row_blocks(self, request: Request) -> tuple[int, ...]:
        """The request's blocks by position; dead ones, which nobody reads, appear as a live one."""
        num_dead = request.num_dead_blocks
        alive = request.block_ids[num_dead:]
        return (alive[0],) * num_dead + tuple(alive)

    def take_cached(self, request: Request) -> None:
        """Let the request begin behind the longest cached prefix of its reusable tokens."""
        if not self.prefix_caching or request.block_ids or request.swapped:
            return
        most = request.num_reusable_tokens // self.layout.block_size
        found = self.pool.find(self._hashes(request, most))
        self.pool.take(found)
        request.block_ids = found
        request.num_published_blocks = len(found)
        request.num_found_tokens = len(found) * self.layout.block_size
        request.num_computed_tokens = request.num_found_tokens

    def allocate(self, request: Request, num_tokens: int) -> None:
        """Allocate blocks for the next `num_tokens`; swapped ones come back. Raises ArenaFull."""
        blocks = self.pool.allocate(self.num_missing(request, num_tokens))
        if request.swapped:
            self.swap.move_in(request.swapped, blocks[: len(request.swapped)])
            request.swapped = []
            request.block_ids = [_DEAD] * request.num_dead_blocks
        elif self._writes_to_shared(request):
            self._copy_last(request, blocks.pop())
        request.block_ids += blocks

    def fork(self, request: Request, child: Request) -> None:
        """Have another answer to the prompt go on as this one, in the same blocks. Whoever is the
        first to write to the last of them copies it before (copy on write).

        A preempted request has no blocks to share.
        """
        child.block_hashes = list(request.block_hashes)
        if not request.block_ids:
            return
        self.pool.take(request.block_ids[request.num_dead_blocks :])
        child.block_ids = list(request.block_ids)
        child.num_computed_tokens = request.num_computed_tokens
        child.num_dead_blocks = request.num_dead_blocks
        child.num_published_blocks = request.num_published_blocks

    def settle(self, request: Request) -> None:
        """Publish the blocks that have become full, and give back those that no layer sees now."""
        if not request.block_ids:
            return
        if self.prefix_caching:
            self._publish(request)
        if self.sliding_window is not None:
            # The next token sees itself and `sliding_window - 1` before it.
            num_behind = request.num_computed_tokens + 1 - self.sliding_window
            self._bury(request, max(0, num_behind) // self.layout.block_size)

    def trim(self, request: Request) -> None:
        """Give back the blocks behind all tokens that are computed, in flight or to do: those of
        rejected drafts.
        """
        num_tokens = request.num_scheduled_tokens + max(0, request.num_tokens_to_do)
        end = max(self.layout.num_blocks(num_tokens), request.num_dead_blocks)
        self._release(request, end, len(request.block_ids))
        del request.block_ids[end:]
        num_swapped = end - request.num_dead_blocks
        self.swap.free(request.swapped[num_swapped:])
        del request.swapped[num_swapped:]

    def preempt(self, request: Request) -> bool:
        """Give back a request's blocks; return whether the swap space keeps their contents."""
        num_tokens = request.num_scheduled_tokens
        blocks = request.block_ids[request.num_dead_blocks : self.layout.num_blocks(num_tokens)]
        is_swapped = self.swap.is_worth_it(num_tokens, len(blocks))
        if is_swapped:
            request.swapped = self.swap.move_out(blocks)
            self.arena.expect_step()
        self.give_back(request)
        return is_swapped

    def give_back(self, request: Request) -> None:
        """Give back the request's blocks; what it had computed is lost unless it was swapped."""
        self._release(request, request.num_dead_blocks, len(request.block_ids))
        request.block_ids, request.num_published_blocks = [], 0
        if not request.swapped:
            request.num_computed_tokens = request.num_dead_blocks = 0

    def forget(self, request: Request) -> None:
        """Give back the blocks and swap places of a request that has ended, or lost its beam."""
        self.swap.free(request.swapped)
        request.swapped = []
        self.give_back(request)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Assert that every block has the owners it counts.   requests: all that have not ended."""
        requests = list(requests)
        held = Counter(b for r in requests for b in r.block_ids[r.num_dead_blocks :])
        self.pool.check_integrity(held)
        self.swap.check_integrity([slot for r in requests for slot in r.swapped])
        for request in requests:
            assert not (request.block_ids and request.swapped)
            have = len(request.block_ids) or request.num_dead_blocks + len(request.swapped)
            assert have >= self.layout.num_blocks(request.num_computed_tokens)
            dead = request.block_ids[: request.num_dead_blocks]
            assert set(dead) <= {_DEAD}

    def _writes_to_shared(self, request: Request) -> bool:
        """Whether its next token goes into its last block, and other beams use that as well."""
        if not request.is_beam or not request.block_ids:
            return False
        is_full = request.num_scheduled_tokens == len(request.block_ids) * self.layout.block_size
        return not is_full and self.pool.is_shared(request.block_ids[-1])

    def _copy_last(self, request: Request, block_id: int) -> None:
        """Have the next step copy the request's last block, which others use, to this one."""
        place = len(request.block_ids) - 1
        self.copies.append((request.block_ids[place], block_id))
        self.arena.expect_step()
        self._release(request, place, place + 1)
        request.block_ids[place] = block_id

    def _publish(self, request: Request) -> None:
        num_full = request.num_computed_tokens // self.layout.block_size
        if num_full == request.num_published_blocks:
            return
        hashes = self._hashes(request, num_full)
        first = max(request.num_published_blocks, request.num_dead_blocks)
        for i in range(first, num_full):
            known = self.pool.publish(request.block_ids[i], hashes[i])
            if known != request.block_ids[i]:
                self._release(request, i, i + 1)
                request.block_ids[i] = known
        request.num_published_blocks = num_full

    def _bury(self, request: Request, num_dead: int) -> None:
        """Give back the first `num_dead` blocks, which no token that is still to come can see."""
        behind = slice(request.num_dead_blocks, num_dead)
        self._release(request, request.num_dead_blocks, num_dead)
        request.block_ids[behind] = [_DEAD] * len(request.block_ids[behind])
        request.num_dead_blocks = max(request.num_dead_blocks, num_dead)

    def _release(self, request: Request, start: int, end: int) -> None:
        """Give up the request's blocks [start, end). Idle ones are kept for those who can use them:

        [0, public)    everybody
        [public, base) its tenant
        [base, ..)     its tenant, while its adapter is in the arena
        """
        if start >= end:
            return
        reload_s = self.swap.costs.prefill_s(self.layout.block_size)
        base = request.adapter_start // self.layout.block_size
        public = min(request.num_public_blocks, base)
        tenant_id, weight = request.tenant_id, request.message.weight
        for first, last, claim in (
            (base, end, Claim(tenant_id, weight, request.adapter_key)),
            (public, min(base, end), Claim(tenant_id, weight)),
            (0, min(public, end), Claim(EVERYBODY)),
        ):
            self.pool.release(request.block_ids[max(first, start) : last], claim, reload_s)

    def _hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """Hashes of the request's first blocks, each computed once."""
        hashes, size = request.block_hashes, self.layout.block_size
        start = request.adapter_start
        # The scope includes the start: the same tokens may be a prompt here and generated there,
        # where a second invocation does not move the start.
        own_scope = request.scope + start.to_bytes(8, "little")
        for i in range(len(hashes), num_blocks):
            tokens = request.tokens(i * size, (i + 1) * size)
            is_base = request.adapter is None or (i + 1) * size <= start
            is_public = is_base and i < request.num_public_blocks
            scope = request.base_scope if is_base else own_scope
            parent = hashes[-1] if hashes else b""
            hashes.append(self.hasher.hash(parent, scope, is_public, tokens))
        return hashes[:num_blocks]
