"""Chooses tokens as `engine.steps.sampler` does, in two halves, without waiting for the device.

The host packs the rows' parameters into plain ints, which are sent with the step. On the device,
kernels choose; a token that the previous step is still choosing is looked up there.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.gpu.kernels import Kernels
from engine.grammar.matcher import Mask
from engine.steps.batch import ScheduledRow
from engine.steps.sampler import COLDEST, restrictions, told_token_ids, uniform
from engine.steps.scoring import chunks
from engine.wire.messages import SamplingParams, TokenLogprobs
from kernels.sampling import keep_bits, restrict
from kernels.work import PenaltyWork, SamplingWork

MOST_TOP_LOGPROBS = 32
"""Limit on the likeliest tokens that are reported beside one token, twice the beams of a search;
buffers hold no more.
"""
MOST_GIVEN_LOGPROBS = 128
"""Limit on the tokens that a row may ask for by their ids."""
_TOLD_BYTES = 16 << 20
"""Logits of which the likeliest are looked up at once, which takes ten times as much beside."""

Array = npt.NDArray[np.generic]
Fields = dict[str, Array]


@dataclass(frozen=True, slots=True)
class Told:
    """Rows that want logprobs.   top_counts: how many likeliest or given tokens each of them gets.

    given: the tokens that it asks for; none for the likeliest ones.
    """

    top_counts: Sequence[int]
    given: Sequence[Sequence[int]] = ()

    @classmethod
    def of(
        cls, counts: Sequence[int], vocab_size: int, given: Sequence[Sequence[int]] = ()
    ) -> "Told":
        most = min(MOST_TOP_LOGPROBS, vocab_size)
        likeliest = [min(count, most) for count in counts]
        if not any(given):
            return cls(likeliest)
        given = [ids[:MOST_GIVEN_LOGPROBS] for ids in given]
        return cls([len(ids) or n for ids, n in zip(given, likeliest, strict=True)], given)

    @property
    def depth(self) -> int:
        """How many tokens are looked up for each of these rows."""
        return max(self.top_counts, default=0)

    @property
    def given_ids(self) -> npt.NDArray[np.int32]:
        """`given` as [rows, depth], filled up with -1; [0] if no row asks for tokens."""
        if not self.given:
            return np.empty(0, dtype=np.int32)
        return np.array([[*ids, *[-1] * (self.depth - len(ids))] for ids in self.given], np.int32)


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Sampling parameters of a step's rows, on the host.

    choice, penalties: fields of SamplingWork, and of PenaltyWork without `previous`; the latter
    are empty if no row has penalties or a bias.   restrictions: as engine.steps.sampler returns
    them, in this order; empty if no row has any.   told_rows: [n] int32, rows that want logprobs.
    """

    num_rows: int
    choice: Fields
    penalties: Fields
    restrictions: Fields
    told_rows: npt.NDArray[np.int32]
    told: Told

    @classmethod
    def of(
        cls, rows: Sequence[ScheduledRow], sources: Sequence[int], vocab_size: int
    ) -> "SamplingInputs":
        """The inputs of these rows, which all have `sampling`.

        sources: for a row with PENDING_TOKEN, the place of that token among those that the previous
        step chooses; -1 for the others.
        """
        params = [row.sampling for row in rows if row.sampling is not None]
        assert len(params) == len(rows) == len(sources)
        told = [i for i, p in enumerate(params) if p.logprobs is not None]
        counts = [params[i].logprobs or 0 for i in told]
        given = [told_token_ids(params[i], vocab_size) for i in told]
        return cls(
            num_rows=len(rows),
            choice=_choice(rows, params, vocab_size),
            penalties=_penalties(rows, params, sources, vocab_size),
            restrictions=_restrictions(rows, vocab_size),
            told_rows=np.array(told, dtype=np.int32),
            told=Told.of(counts, vocab_size, given),
        )

    def pack(self) -> npt.NDArray[np.int32]:
        """Pack all fields into one array. The float64 ones come first, so they stay aligned."""
        return np.concatenate([array.view(np.int32) for _, array in self._fields()])

    def views(self, ints: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of the packed ints on the device, by field.   ints: 8 bytes aligned."""
        views, at = {}, 0
        for name, array in self._fields():
            end = at + array.nbytes // 4
            views[name] = ints[at:end].view(getattr(torch, array.dtype.name))
            at = end
        return views

    def _fields(self) -> Iterator[tuple[str, Array]]:
        yield from self.choice.items()
        yield from self.penalties.items()
        yield from self.restrictions.items()
        yield "told_rows", self.told_rows
        yield "given_ids", self.told.given_ids.flatten()


def _choice(
    rows: Sequence[ScheduledRow], params: Sequence[SamplingParams], vocab_size: int
) -> Fields:
    numbers = [uniform(row.seed, row.num_output_tokens) for row in rows]
    warm = [p.temperature if p.temperature >= COLDEST else 0.0 for p in params]
    return {
        "min_p": np.array([p.min_p for p in params], dtype=np.float64),
        "top_p": np.array([p.top_p for p in params], dtype=np.float64),
        "uniform": np.array(numbers, dtype=np.float64),
        "temperature": np.array(warm, dtype=np.float32),
        "top_k": np.array([min(p.top_k, vocab_size) for p in params], dtype=np.int32),
    }


def _penalties(
    rows: Sequence[ScheduledRow],
    params: Sequence[SamplingParams],
    sources: Sequence[int],
    vocab_size: int,
) -> Fields:
    if not any(p.has_penalties or p.logit_bias for p in params):
        return {}
    seen = [_seen(row, p, vocab_size) for row, p in zip(rows, params, strict=True)]
    bias = [_bias(p, vocab_size) for p in params]
    pending = [s if p.has_penalties else -1 for s, p in zip(sources, params, strict=True)]
    return {
        "entry_starts": _starts(seen),
        "entry_tokens": np.concatenate([tokens for tokens, _ in seen]),
        "entry_counts": np.concatenate([counts for _, counts in seen]),
        "pending": np.array(pending, dtype=np.int32),
        "repetition": np.array([p.repetition_penalty for p in params], dtype=np.float32),
        "frequency": np.array([p.frequency_penalty for p in params], dtype=np.float32),
        "presence": np.array([p.presence_penalty for p in params], dtype=np.float32),
        "bias_starts": _starts(bias),
        "bias_tokens": np.concatenate([tokens for tokens, _ in bias]),
        "bias": np.concatenate([values for _, values in bias]),
    }


def _restrictions(rows: Sequence[ScheduledRow], vocab_size: int) -> Fields:
    places = dict(
        zip(("limited", "allowed", "banned"), restrictions(rows, vocab_size), strict=True)
    )
    if not any(places.values()):
        return {}
    return {name: np.array(ints, dtype=np.int32) for name, ints in places.items()}


def _seen(row: ScheduledRow, params: SamplingParams, vocab_size: int) -> tuple[Array, Array]:
    """Distinct tokens that penalties apply to, and how often each was generated."""
    repeats = params.repetition_penalty != 1.0
    prompt = row.prompt_token_ids if repeats else ()
    output = row.output_token_ids if params.has_penalties else ()
    # A pending token is no token of the vocabulary yet.
    tokens, places = np.unique(np.array(prompt + output, dtype=np.int64), return_inverse=True)
    counts = np.bincount(places[len(prompt) :], minlength=len(tokens))
    is_known = (tokens >= 0) & (tokens < vocab_size)
    return tokens[is_known].astype(np.int32), counts[is_known].astype(np.int32)


def _bias(params: SamplingParams, vocab_size: int) -> tuple[Array, Array]:
    total: dict[int, float] = {}
    for token, value in params.logit_bias:
        if 0 <= token < vocab_size:
            total[token] = total.get(token, 0.0) + value
    return np.array([*total], dtype=np.int32), np.array([*total.values()], dtype=np.float32)


def _starts(pairs: Sequence[tuple[Array, Array]]) -> npt.NDArray[np.int32]:
    return np.cumsum([0, *(len(tokens) for tokens, _ in pairs)], dtype=np.int32)


# ---- logprobs ----


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Buffers for logprobs, on the device or on the host.

    chosen: [n] float32, of the chosen tokens.   ranks: [n] int32, of the same.
    top_values: float32, top_ids: int64, of the likeliest ones, [rows, depth] from the first
    element on.
    """

    chosen: torch.Tensor
    ranks: torch.Tensor
    top_values: torch.Tensor
    top_ids: torch.Tensor

    @classmethod
    def empty(
        cls, most: int, make: Callable[..., torch.Tensor], depth: int = MOST_TOP_LOGPROBS
    ) -> "Logprobs":
        """Buffers for `most` rows.   make: takes a size and a dtype, as `torch.empty` does."""
        num_tops = most * depth
        return cls(
            make(most, dtype=torch.float32),
            make(most, dtype=torch.int32),
            make(num_tops, dtype=torch.float32),
            make(num_tops, dtype=torch.int64),
        )

    def used(self, told: Told) -> list[torch.Tensor]:
        """The parts of the buffers that a step fills; none if no row wants logprobs."""
        count = len(told.top_counts)
        tops = count * told.depth
        of_rows, of_tops = (self.chosen, self.ranks), (self.top_values, self.top_ids)
        parts = [part[:count] for part in of_rows] + [part[:tops] for part in of_tops]
        return [part for part in parts if len(part)]

    def behind(self, count: int, depth: int) -> "Logprobs":
        """The same buffers without the first `count` rows, for the rows after those."""
        tops = count * depth
        of_rows = self.chosen[count:], self.ranks[count:]
        return Logprobs(*of_rows, self.top_values[tops:], self.top_ids[tops:])

    def read(self, told: Told) -> list[TokenLogprobs]:
        """Read logprobs into objects; the entry of a row without a token is meaningless."""
        shape = len(told.top_counts), told.depth
        chosen, ranks = (part[: shape[0]].tolist() for part in (self.chosen, self.ranks))
        values = self.top_values[: shape[0] * shape[1]].view(shape).tolist()
        ids = self.top_ids[: shape[0] * shape[1]].view(shape).tolist()
        tops = [tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
        return [
            TokenLogprobs(logprob=logprob, rank=rank, top=top[:count])
            for logprob, rank, top, count in zip(chosen, ranks, tops, told.top_counts, strict=True)
        ]


# ---- on the device ----


def pack_mask(place: int, mask: Mask, target: torch.Tensor) -> None:
    """Write a row's number and its mask on the host.   target: [8 + mask bytes] uint8."""
    target[:8].view(torch.int64)[0] = place
    target[8:] = torch.from_numpy(mask)


def choose(
    kernels: Kernels,
    logits: torch.Tensor,
    inputs: SamplingInputs,
    ints: torch.Tensor,
    tokens: torch.Tensor,
    logprobs: Logprobs,
    masks: torch.Tensor,
) -> None:
    """Choose a token for each row, and write it into `tokens`; BAD_LOGITS if a logit is not finite.

    Rows that want logprobs get those of the raw logits, in `logprobs`. Nothing here waits for the
    device.   logits: [rows, vocab] float32, changed in place by bias and penalties.
    ints: `inputs` packed.   tokens: [..] int32; before, those of the previous step.
    masks: see `pack_mask`, [.., 8 + mask bytes].
    """
    views, depth = inputs.views(ints), inputs.told.depth
    told = views["told_rows"]
    given = views["given_ids"].view(-1, depth).long() if inputs.told.given else None
    raw = logits.index_select(0, told)
    if inputs.penalties:
        penalties = {name: views[name] for name in inputs.penalties}
        kernels.adjust_logits(logits, PenaltyWork(**penalties, previous=tokens))
    if inputs.restrictions:
        restrict(logits, *(views[name].long() for name in inputs.restrictions))
    if len(masks):
        rows = masks[:, :8].contiguous().view(torch.int64).flatten()
        keep_bits(logits, rows, masks[:, 8:])
    work = SamplingWork(**{name: views[name] for name in inputs.choice})
    tokens[: inputs.num_rows] = kernels.sample(logits, work)
    for part in chunks(len(raw), raw.shape[1], _TOLD_BYTES):
        chosen = tokens.index_select(0, told[part])
        own = None if given is None else given[part]
        there = logprobs.behind(part.start, depth)
        tell(raw[part].log_softmax(dim=-1), chosen, depth, there, own)


def tell(
    raw: torch.Tensor,
    tokens: torch.Tensor,
    depth: int,
    logprobs: Logprobs,
    given: torch.Tensor | None = None,
) -> None:
    """Write logprobs and ranks of tokens, and the logprobs of the `depth` likeliest ones; nothing
    waits for the device.

    raw: [rows, vocab] logprobs.   tokens: [rows].
    given: [rows, depth], tokens in place of the likeliest ones; -1 where the likeliest one stays.
    """
    told = len(raw)
    chosen = tokens.clamp(min=0).long()[:, None]
    own = raw.gather(1, chosen)
    logprobs.chosen[:told] = own.squeeze(1)
    is_lower = torch.arange(raw.shape[1], device=raw.device) < chosen
    is_before = torch.where(is_lower, raw >= own, raw > own)
    logprobs.ranks[:told] = 1 + is_before.sum(dim=1, dtype=torch.int32)
    if depth:
        ids = _likeliest(raw, depth)
        if given is not None:
            ids = torch.where(given >= 0, given, ids)
        logprobs.top_ids[: told * depth] = ids.flatten()
        logprobs.top_values[: told * depth] = raw.gather(1, ids).flatten()


def _likeliest(logprobs: torch.Tensor, k: int) -> torch.Tensor:
    """Ids of the k highest of each row, falling; of equal ones the lower first.   [rows, k] int64.

    `topk` leaves open which of equal values it takes, so it is given values that differ: the bits
    of the logprob, in an order that is the logprob's own, and below them the id.
    """
    bits = logprobs.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = logprobs.shape[1] - 1
    ids = torch.arange(last, -1, -1, device=logprobs.device)
    top = torch.topk((ordered << 32) | ids, k).values
    return last - (top & 0xFFFFFFFF)
