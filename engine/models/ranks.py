"""The ranks that share one model: which part this one holds, and how their results are combined.

An engine with a single rank has None in place of Ranks, at no cost.
"""

import atexit
import os
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from lora.shard import Shard

_JOIN_TIMEOUT_S = 120.0
"""Longest wait until every process has joined: each imports torch first."""
_START_TIMEOUT_S = 1800.0
"""Longest wait until every rank has read its weights."""
_STEP_TIMEOUT_S = 60.0
"""Longest wait for a sum in a step, which all ranks begin together. A lost rank shows at once."""


class Ranks(Protocol):
    """All ranks, as one of them sees them. Every rank makes the same calls in the same order.

    shard: the part of the model that this rank holds.
    """

    shard: Shard

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over all ranks, with the same bits on each."""
        ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by the first rank's, on every rank."""
        ...

    def least(self, value: int) -> int:
        """Least value of all ranks. For the start, not for steps, since it waits on the host."""
        ...


class TorchRanks:
    """Ranks over torch.distributed: gloo between CPUs, NCCL between GPUs. A process has one.

    Ranks meet by a file, and gloo's sockets are on the loopback device, since all ranks of an
    engine are on one machine.
    """

    def __init__(self, shard: Shard, store: Path, device: str) -> None:
        """Join the other ranks.

        store: a file that no others can open, the same for all ranks.   device: "cpu" or "cuda".
        Raises RuntimeError (or an error of torch.distributed) if not all ranks join.
        """
        self.shard = shard
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=_meet(store, shard),
            rank=shard.index,
            world_size=shard.size,
            timeout=timedelta(seconds=_STEP_TIMEOUT_S),
        )
        # Without this, a process that has done all its work may still abort while it exits.
        atexit.register(dist.destroy_process_group)
        start_timeout = timedelta(seconds=_START_TIMEOUT_S)
        self._start = dist.new_group(backend="gloo", timeout=start_timeout)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if tensor.numel() == 0:
            return
        if tensor.is_cuda:
            dist.all_reduce(tensor)
            return
        # gloo adds in an order that depends on where a value lies in the tensor, so that a token's
        # bits would depend on its neighbours: here ranks are added in their order.
        parts = [torch.empty_like(tensor) for _ in range(self.shard.size)]
        dist.all_gather(parts, tensor)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        tensor.copy_(total)

    def broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, src=0)

    def least(self, value: int) -> int:
        found = torch.tensor([value])
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self._start)
        return int(found.item())


def _meet(path: Path, shard: Shard) -> dist.Store:
    """Wait until every process has started, so that each later step takes only a moment."""
    store = dist.FileStore(str(path), shard.size)
    store.set(f"rank {shard.index}", "here")
    everybody = [f"rank {index}" for index in range(shard.size)]
    store.wait(everybody, timedelta(seconds=_JOIN_TIMEOUT_S))
    return store
