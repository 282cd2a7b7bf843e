"""The choice of experts by a router, and the order of tokens by experts, in plain torch."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of a step's tokens. Pair t * per_token + k is token t with its k-th expert.

    weights: [T, per_token] float32, of the pairs.   pairs: [T * per_token] int32, the pairs in the
    order of their experts, those of one expert in the order of tokens.
    tiles: [3, most_tiles] int32: the expert of each tile of `pairs`, the tile's first place in
    `pairs`, and how many pairs it has; 0 for tiles that are not used.
    tile_rows: the most pairs of a tile.
    """

    weights: torch.Tensor
    pairs: torch.Tensor
    tiles: torch.Tensor
    tile_rows: int

    @property
    def per_token(self) -> int:
        return self.weights.shape[1]


def most_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """Number of tiles for which there is room: enough for any choice of experts."""
    return min(num_pairs, num_pairs // tile_rows + num_experts)


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


def group_by_expert(
    chosen: torch.Tensor, weights: torch.Tensor, num_experts: int, tile_rows: int
) -> Routing:
    """Order a step's tokens by experts.   chosen, weights: see choose_experts."""
    flat, tiles, first = chosen.flatten(), [], 0
    for expert, count in enumerate(flat.bincount(minlength=num_experts).tolist()):
        for skipped in range(0, count, tile_rows):
            tiles.append((expert, first + skipped, min(count - skipped, tile_rows)))
        first += count
    tiles += [(0, 0, 0)] * (most_tiles(len(flat), num_experts, tile_rows) - len(tiles))
    return Routing(
        weights,
        flat.argsort(stable=True).int(),
        torch.tensor(tiles, dtype=torch.int32, device=chosen.device).view(-1, 3).T.contiguous(),
        tile_rows,
    )


def weighted_sum(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum of each row's outputs by weights.   outputs: [T, n, hidden].   weights: [T, n] float32.

    The terms are added one by one: torch's own sums have orders that depend on the shape.
    """
    terms = zip(outputs.unbind(1), weights.unsqueeze(-1).unbind(1), strict=True)
    output, weight = next(terms)
    total = output * weight
    for output, weight in terms:
        total += output * weight
    return total.to(outputs.dtype)
