"""Choosing tokens from logits: the plain-torch meaning, which is also the CPU path."""

import torch


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row.   logits: [B, vocab].   Result: [B] int64."""
    return logits.argmax(dim=-1)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """One token a row by inverting the cumulative distribution at `uniform`; rows are independent.

    logits: [B, vocab].   temperature: [B] > 0.   top_k: [B] int64, 0 is off.   top_p: [B] in (0,
    1].
    uniform: [B] float64 in [0, 1).   Result: [B] int64.
    A token is kept while the probability of the likelier ones is below top_p, so one always is.
    """
    scaled = logits.double() / temperature[:, None].double()
    probs, tokens = torch.softmax(scaled, dim=-1).sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[1], device=probs.device)
    limit = torch.where(top_k > 0, top_k, probs.shape[1])
    probs = probs.masked_fill(ranks[None, :] >= limit[:, None], 0.0)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill(before >= top_p[:, None], 0.0)
    cumulative = probs.cumsum(dim=-1)
    target = uniform[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, target, right=True).clamp(max=probs.shape[1] - 1)
    # Rounding may point past the last kept token: step back to it.
    last = (probs > 0).sum(dim=-1, keepdim=True) - 1
    return tokens.gather(1, torch.minimum(chosen, last)).squeeze(1)
