"""Adapters added by plain torch, from stacked copies of their matrices: what ours is compared with,
and what it is checked by.
"""

from collections.abc import Sequence

import torch

from bench.gpu.adapters import stack
from kernels.work import Site
from lora.batch import DeviceTables
from lora.packed import PackedForm

Matrices = tuple[torch.Tensor, list[torch.Tensor]]
"""A of a site's projections, [adapters, projections, rank, in], and B of each, [adapters, rank,
out].
"""


class Stacked:
    """The adapters of some layers, all as large as the highest rank.

    slots: [T] int64, each token's adapter.
    """

    def __init__(
        self,
        form: PackedForm,
        slabs: torch.Tensor,
        tables: Sequence[DeviceTables],
        slots: torch.Tensor,
        sites: Sequence[Site],
    ) -> None:
        self.slots = slots
        self._is_own = slots[:, None] == torch.arange(len(tables), device=slots.device)
        self._sites = {
            (site.layer, site.projections): self._stack(form, slabs, tables, site) for site in sites
        }

    @staticmethod
    def _stack(
        form: PackedForm, slabs: torch.Tensor, tables: Sequence[DeviceTables], site: Site
    ) -> Matrices:
        pairs = [stack(form, slabs, tables, site.layer, number) for number in site.projections]
        return torch.stack([a for a, _ in pairs], dim=1), [b for _, b in pairs]

    def matrices(self, site: Site) -> Matrices:
        return self._sites[site.layer, site.projections]

    def gathered(
        self, x: torch.Tensor, weight: torch.Tensor, site: Site
    ) -> tuple[torch.Tensor, None]:
        """Every token's matrices copied beside each other, and batched products."""
        a, bs = self.matrices(site)
        y = x @ weight.T
        h = torch.bmm(a[self.slots].flatten(1, 2), x[:, :, None])[:, :, 0]
        for part, own, b in zip(
            y.split(site.out_features, dim=1), h.chunk(len(bs), dim=1), bs, strict=True
        ):
            part += torch.bmm(own[:, None], b[self.slots])[:, 0]
        return y, None

    def masked(
        self, x: torch.Tensor, weight: torch.Tensor, site: Site
    ) -> tuple[torch.Tensor, None]:
        """Every token through all adapters, with zeros for those that are not its own."""
        a, bs = self.matrices(site)
        y = x @ weight.T
        h = (x @ a.flatten(0, 2).T).view(len(x), *a.shape[:3])
        h = h * self._is_own[:, :, None, None]
        for part, h_part, b in zip(y.split(site.out_features, dim=1), h.unbind(2), bs, strict=True):
            part += h_part.flatten(1) @ b.flatten(0, 1)
        return y, None

    def exact(self, x: torch.Tensor, weight: torch.Tensor, site: Site) -> tuple[torch.Tensor, None]:
        """In x's dtype, float32 or more, adapter by adapter."""
        a, bs = self.matrices(site)
        y = x @ weight.T
        for slot in self.slots.unique().tolist():
            rows = (self.slots == slot).nonzero()[:, 0]
            h = torch.einsum("ti,pri->tpr", x[rows], a[slot].to(x.dtype))
            delta = [h[:, p] @ b[slot].to(x.dtype) for p, b in enumerate(bs)]
            y[rows] += torch.cat(delta, dim=1)
        return y, None
