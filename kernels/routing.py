"""The choice of experts by a router, in plain torch."""

import torch


def choose_experts(
    logits: torch.Tensor, per_token: int, *, norms_weights: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts: those with the largest softmax of the router's numbers.

    logits: [T, experts].   norms_weights: whether the weights of a token's experts sum up to 1.
    Results: numbers of the experts, [T, per_token] int64, and their weights, float32, the largest
    first. A row's bits depend on the row only.
    """
    weights, chosen = logits.float().softmax(dim=-1).topk(per_token, dim=-1)
    if norms_weights:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return chosen, weights
