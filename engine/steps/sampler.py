"""Chooses one token for every row that samples; a row's choice depends on nothing but the row.

The order is vLLM's: logprobs are of the raw logits; then come bias, repetition, frequency and
presence penalties; then tokens that cannot be chosen are removed; then the likeliest token is
taken, or temperature, min_p, top_k and top_p are applied before one is drawn.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from engine.grammar.matcher import Mask
from engine.steps.batch import BAD_LOGITS, ScheduledRow
from engine.wire.messages import SamplingParams, TokenLogprobs
from kernels.elementwise import is_finite
from kernels.sampling import (
    add_bias,
    draw,
    keep_bits,
    likeliest,
    penalize_frequency,
    penalize_repetition,
    probabilities,
    restrict,
    truncate,
)

_MASK = (1 << 64) - 1
COLDEST = 1e-5
"""Lowest temperature at which tokens are drawn. A lower one is greedy: logits would overflow."""


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for the index-th token of a seed: splitmix64 needs no state, no order."""
    z = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1342543DE82EF95) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 11) / (1 << 53)


def choose(
    logits: torch.Tensor, rows: Sequence[ScheduledRow], masks: Mapping[int, Mask] | None = None
) -> tuple[list[int], dict[int, TokenLogprobs]]:
    """Choose a token id per row; also return logprobs by position in `rows`, if requested.

    The token is BAD_LOGITS if a logit is not finite.   logits: [rows, vocab]; float32 ones are
    changed in place by bias and penalties.   rows: all have `sampling`.
    masks: by position in `rows`, of the tokens that may be chosen.
    """
    logits = logits.float()
    params = [row.sampling for row in rows if row.sampling is not None]
    assert len(params) == len(rows) == len(logits)
    finite = is_finite(logits)
    asked = [i for i, p in enumerate(params) if p.logprobs is not None]
    logprobs = logits[asked].log_softmax(dim=-1) if asked else logits[:0]
    _adjust(logits, rows, params)
    if masks:
        bits = torch.from_numpy(np.stack(list(masks.values())))
        keep_bits(logits, torch.tensor(list(masks)), bits.to(logits.device))
    tokens = logits.argmax(dim=-1)
    drawn = [i for i, p in enumerate(params) if p.temperature >= COLDEST]
    if drawn:
        # Bad logits become 0, so that the arithmetic stays sound; their rows are replaced below.
        sane = logits[drawn].nan_to_num_(0.0, 0.0, 0.0)
        tokens[drawn] = _draw(sane, [rows[i] for i in drawn], [params[i] for i in drawn])
    token_ids = torch.where(finite, tokens, BAD_LOGITS).tolist()
    good = [j for j, i in enumerate(asked) if token_ids[i] != BAD_LOGITS]
    told = [asked[j] for j in good]
    counts = [params[i].logprobs or 0 for i in told]
    named = name_tokens(logprobs[good], [token_ids[i] for i in told], counts)
    for j, (place, i) in enumerate(zip(good, told, strict=True)):
        if given := told_token_ids(params[i], logits.shape[1]):
            values = logprobs[place, given].tolist()
            named[j] = replace(named[j], top=tuple(zip(given, values, strict=True)))
    return token_ids, dict(zip(told, named, strict=True))


# ---- bias and penalties ----


def _adjust(
    logits: torch.Tensor, rows: Sequence[ScheduledRow], params: Sequence[SamplingParams]
) -> None:
    """Apply bias, penalties and restrictions in place; other logits are not touched."""
    biased = [(i, [token for token, _ in p.logit_bias]) for i, p in enumerate(params)]
    if any(tokens for _, tokens in biased):
        positions, is_known = _positions(logits, biased)
        bias = _floats(logits, (value for p in params for _, value in p.logit_bias))
        add_bias(logits, positions, bias[is_known])
    repeating = [i for i, p in enumerate(params) if p.repetition_penalty != 1.0]
    if repeating:
        seen = [(i, rows[i].prompt_token_ids + rows[i].output_token_ids) for i in repeating]
        penalty = _floats(logits, (p.repetition_penalty for p in params))
        penalize_repetition(logits, _positions(logits, seen)[0], penalty)
    counting = [i for i, p in enumerate(params) if p.frequency_penalty or p.presence_penalty]
    if counting:
        said = [(i, rows[i].output_token_ids) for i in counting]
        frequency = _floats(logits, (p.frequency_penalty for p in params))
        presence = _floats(logits, (p.presence_penalty for p in params))
        penalize_frequency(logits, _positions(logits, said)[0], frequency, presence)
    restricted = [torch.tensor(places) for places in restrictions(rows, logits.shape[1])]
    if any(map(len, restricted)):
        restrict(logits, *(places.long().to(logits.device) for places in restricted))


def restrictions(
    rows: Sequence[ScheduledRow], vocab_size: int
) -> tuple[list[int], list[int], list[int]]:
    """Rows with allowed tokens only, and the flat positions of allowed and of banned tokens."""
    limited: list[int] = []
    allowed: list[int] = []
    banned: list[int] = []
    for number, row in enumerate(rows):
        if row.sampling is not None and row.sampling.allowed_token_ids:
            limited.append(number)
            allowed += _known(number, row.sampling.allowed_token_ids, vocab_size)
        banned += _known(number, row.banned_token_ids, vocab_size)
    return limited, allowed, banned


def _known(row: int, token_ids: Sequence[int], vocab_size: int) -> list[int]:
    return [row * vocab_size + token for token in token_ids if 0 <= token < vocab_size]


def _positions(
    logits: torch.Tensor, tokens_by_row: Sequence[tuple[int, Sequence[int]]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of tokens in the flat logits, and which of the tokens the vocabulary has."""
    tokens = torch.tensor([t for _, tokens in tokens_by_row for t in tokens], dtype=torch.int64)
    rows = torch.tensor([row for row, _ in tokens_by_row], dtype=torch.int64)
    rows = rows.repeat_interleave(torch.tensor([len(tokens) for _, tokens in tokens_by_row]))
    is_known = (tokens >= 0) & (tokens < logits.shape[1])
    positions = (rows * logits.shape[1] + tokens)[is_known]
    return positions.to(logits.device), is_known.to(logits.device)


def _floats(logits: torch.Tensor, values: Iterable[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=logits.dtype, device=logits.device)


# ---- drawing ----


def _draw(
    logits: torch.Tensor, rows: Sequence[ScheduledRow], params: Sequence[SamplingParams]
) -> torch.Tensor:
    """Draw a token for each row, by its own temperature and number.   Result: [rows] int64."""
    device = logits.device
    temperature = torch.tensor([p.temperature for p in params], device=device)
    probs = probabilities(logits, temperature)
    cut = [i for i, p in enumerate(params) if p.min_p > 0 or p.top_k > 0 or p.top_p < 1]
    if cut:
        probs[cut] = truncate(
            probs[cut],
            torch.tensor([params[i].min_p for i in cut], dtype=torch.float64, device=device),
            torch.tensor([params[i].top_k for i in cut], device=device),
            torch.tensor([params[i].top_p for i in cut], dtype=torch.float64, device=device),
        )
    numbers = [uniform(row.seed, row.num_output_tokens) for row in rows]
    return draw(probs, torch.tensor(numbers, dtype=torch.float64, device=device))


# ---- logprobs ----


def told_token_ids(params: SamplingParams, vocab_size: int) -> list[int]:
    """The tokens of the vocabulary that a row asks for, each once; none for the likeliest ones."""
    return [*dict.fromkeys(token for token in params.logprob_token_ids if token < vocab_size)]


def name_tokens(
    logprobs: torch.Tensor, token_ids: Sequence[int], top_counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Logprobs of each row's token and of its likeliest tokens.

    logprobs: [rows, vocab], on the CPU.   top_counts: how many likeliest tokens each row wants.
    """
    if not token_ids:
        return []
    counts = [min(count, logprobs.shape[1]) for count in top_counts]
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(counts)
    if any(counts):
        values, tokens = (part.tolist() for part in likeliest(logprobs, max(counts)))
        tops = [tuple(zip(*pair, strict=True)) for pair in zip(tokens, values, strict=True)]
    return [
        TokenLogprobs(logprob=row[token].item(), rank=_rank(row, token), top=top[:count])
        for row, token, top, count in zip(logprobs.numpy(), token_ids, tops, counts, strict=True)
    ]


def _rank(logprobs: npt.NDArray[np.float32], token_id: int) -> int:
    """A token's place in one row, from 1. numpy counts fifteen times as fast as torch."""
    own = logprobs[token_id]
    before = np.count_nonzero(logprobs[:token_id] >= own)
    return 1 + int(before + np.count_nonzero(logprobs[token_id + 1 :] > own))
