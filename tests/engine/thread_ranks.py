"""Ranks as threads of one process, for tests, which exchange values through a list."""

import threading

from lora.shard import Shard

_TIMEOUT_S = 60.0


class ThreadRanks:
    """The Ranks of engine.models between threads. Those of a group share `board` and `barrier`."""

    def __init__(self, shard, board, barrier):
        self.shard = shard
        self._board = board
        self._barrier = barrier
        self.num_reduced = 0

    @classmethod
    def group(cls, size):
        board, barrier = [None] * size, threading.Barrier(size)
        return [cls(Shard(index, size), board, barrier) for index in range(size)]

    def all_reduce(self, tensor):
        self.num_reduced += 1
        parts = self._exchange(tensor.clone())
        tensor.copy_(sum(parts[1:], start=parts[0]))

    def broadcast(self, tensor):
        tensor.copy_(self._exchange(tensor.clone())[0])

    def least(self, value):
        return min(self._exchange(value))

    def leave(self):
        """Make the other ranks fail from now on, so that they do not wait for this one."""
        self._barrier.abort()

    def _exchange(self, value):
        self._board[self.shard.index] = value
        self._barrier.wait(_TIMEOUT_S)
        values = list(self._board)
        self._barrier.wait(_TIMEOUT_S)
        return values


def on_all(group, work):
    """Run `work(ranks)` on all ranks at once; return the results or raise the first error."""
    results, errors = [None] * len(group), []

    def run(ranks):
        try:
            results[ranks.shard.index] = work(ranks)
        except BaseException as error:
            errors.append(error)
            ranks.leave()

    threads = [
        threading.Thread(target=run, args=(ranks,), name=f"rank {ranks.shard.index}")
        for ranks in group
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next(
            (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]
        )
    return results
