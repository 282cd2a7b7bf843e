"""Adapters added by plain torch, from stacked copies of their matrices. Our kernels are compared
with it and checked by it.
"""

from collections.abc import Sequence

import torch

from bench.gpu.adapters import stack
from kernels.work import Site
from lora.batch import DeviceTables
from lora.packed import PackedForm

Matrices = tuple[torch.Tensor, list[torch.Tensor]]
"""A of a site's projections, [adapters, projections, rank, in], and each projection's B, [adapters,
rank, out].
"""


class Stacked:
    """The adapters' matrices in some layers, all padded to the highest rank.

    slots: [T] int64, the adapter of each token.
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
        """Gathers a copy of each token's matrices, and multiplies in batched products."""
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
        """Multiplies every token with all adapters, and zeroes the products with other tokens'
        adapters.
        """
        a, bs = self.matrices(site)
        y = x @ weight.T
        h = (x @ a.flatten(0, 2).T).view(len(x), *a.shape[:3])
        h = h * self._is_own[:, :, None, None]
        for part, h_part, b in zip(y.split(site.out_features, dim=1), h.unbind(2), bs, strict=True):
            part += h_part.flatten(1) @ b.flatten(0, 1)
        return y, None

    def exact(self, x: torch.Tensor, weight: torch.Tensor, site: Site) -> tuple[torch.Tensor, None]:
        """Computes adapter by adapter, in x's dtype, which is float32 or wider."""
        a, bs = self.matrices(site)
        y = x @ weight.T
        for slot in self.slots.unique().tolist():
            rows = (self.slots == slot).nonzero()[:, 0]
            h = torch.einsum("ti,pri->tpr", x[rows], a[slot].to(x.dtype))
            delta = [h[:, p] @ b[slot].to(x.dtype) for p, b in enumerate(bs)]
            y[rows] += torch.cat(delta, dim=1)
        return y, None
