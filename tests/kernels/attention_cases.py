"""Sequences in paged KV, and a step's queries on them, for tests of attention kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch

from engine.gpu.decodes import Decodes
from kernels.gpu.prefill_attention import prefill_queries
from kernels.work import AttentionWork, decode_queries
from tests.gpu.trials.trial import CPU, apart, check_gaps

Attend = Callable[..., None]

_GARBAGE = 10**9


@dataclass(frozen=True)
class AttentionCase:
    """Inputs of attention.

    q: [T, heads, head_dim], a view of [T, heads + 2 * kv heads, head_dim].
    """

    q: torch.Tensor
    kv: torch.Tensor
    work: AttentionWork

    def placed(self, there: torch.device) -> "AttentionCase":
        """The same case in a device's memory, with q and kv in rows that are not adjacent."""
        tensors = {
            field.name: getattr(self.work, field.name).to(there)
            for field in fields(self.work)
            if field.name != "prefill_queries"
        }
        q, kv = apart(there, self.q, self.kv)
        return AttentionCase(q, kv, replace(self.work, **tensors))

    def run(self, attend: Attend, window: int | None = None, *scores: float | None) -> torch.Tensor:
        """The output of `attend`, NaN where it writes nothing; its rows are not adjacent.

        scores: further arguments of `attend`, about scores.
        """
        (out,) = apart(self.q.device, torch.full_like(self.q, torch.nan))
        attend(out, self.q, self.kv, self.work, window, *scores)
        check_gaps(out)
        return out

    def row(self, index: int) -> torch.Tensor:
        """Indices of a row's tokens."""
        return torch.arange(*self.work.query_starts[index : index + 2].tolist())


def make_case(
    rows: Sequence[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    num_spare: int = 3,
    most_decoded: int = 1,
    num_parts: int = 1,
    seed: int = 0,
) -> AttentionCase:
    """Make random inputs of attention.

    rows: (positions, tokens of this step) each; (0, 1) is padding.

    A sequence's numbers depend on its length and the seed only. Its blocks are scattered, and KV is
    NaN elsewhere.
    num_spare: number of unused blocks, and of invalid items of each part.
    most_decoded: rows of up to so many tokens decode.   num_parts: of the decodes' items.
    """
    depths = [-(-length // block_size) for length, _ in rows]
    slabs = sum(depths) + num_spare
    kv = torch.full((slabs, 2, kv_heads, block_size, dim), torch.nan).to(kv_dtype or dtype)
    free = torch.randperm(slabs, generator=torch.Generator().manual_seed(len(rows))).tolist()
    tables = [[free.pop() for _ in range(depth)] for depth in depths]
    queries = []
    for (length, count), table in zip(rows, tables, strict=True):
        rng = torch.Generator().manual_seed(length + (seed << 32))
        pairs = torch.randn(2, kv_heads, length, dim, generator=rng).to(kv.dtype)
        for index, block in enumerate(table):
            part = pairs[:, :, index * block_size : (index + 1) * block_size]
            kv[block, :, :, : part.shape[2]] = part
        queries.append(torch.randn(max(length, 1), heads + 2 * kv_heads, dim, generator=rng))
        queries[-1] = queries[-1][-count:]
    q = torch.cat(queries).to(dtype)[:, :heads]
    tile = prefill_queries(heads, kv_heads, dim, dtype, CPU)
    decodes = Decodes(len(q), num_parts, decode_queries(heads, kv_heads), window=None)
    return AttentionCase(q, kv, _work(rows, tables, num_spare, tile, decodes, most_decoded))


def _work(
    rows: Sequence[tuple[int, int]],
    tables: list[list[int]],
    num_spare: int,
    tile: int,
    decodes: Decodes,
    most_decoded: int,
) -> AttentionWork:
    query_starts, block_starts, prefill_items = [0], [0], []
    for index, (length, count) in enumerate(rows):
        query_starts.append(query_starts[-1] + count)
        block_starts.append(block_starts[-1] + len(tables[index]))
        if count > most_decoded:
            prefill_items += [(index, number) for number in range(-(-count // tile))]
        elif length:
            decodes.add(query_starts[-2], length - count, count, block_starts[-2])
    parts = [part.tolist() for part in decodes.items()]
    records = [*decodes.records, *[(0,) * 7] * (query_starts[-1] - len(decodes.records))]
    # Each part has room for its partial sums: one of each query of each item.
    sums = [sum(decodes.records[first].num_queries for first, _ in part) for part in parts]
    room = max(sums) + num_spare
    items = [i for part in parts for i in [*part, *[(_GARBAGE, _GARBAGE)] * (room - len(part))]]
    # Without room for items nobody reads how many there are.
    counts = [len(part) if room else _GARBAGE for part in parts]
    return AttentionWork(
        query_starts=_ints(query_starts),
        seq_lens=_ints([length for length, _ in rows]),
        block_starts=_ints(block_starts[:-1]),
        blocks=_ints([block for table in tables for block in table] + [_GARBAGE]),
        decodes=_ints(records),
        decode_items=_ints(items).view(-1, 2),
        num_decode_items=_ints(counts),
        prefill_items=_ints(prefill_items + [(_GARBAGE, _GARBAGE)] * num_spare).view(-1, 2),
        num_prefill_items=_ints([len(prefill_items) if prefill_items or num_spare else _GARBAGE]),
        prefill_queries=tile,
    )


def _ints(values: Sequence[object]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
