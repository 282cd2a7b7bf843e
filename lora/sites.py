"""The places of a model where adapters apply, as one of its ranks sees them."""

from kernels.work import Site
from lora.layout import PROJECTIONS, ModelShape


def site_of(shape: ModelShape, layer: int, projections: tuple[int, ...]) -> Site:
    """shape: of the rank's shard.   projections: that share their input, side by side."""
    features = [shape.features(projection) for projection in projections]
    return Site(
        layer=layer,
        projections=projections,
        in_features=features[0][0],
        out_features=tuple(num_outputs for _, num_outputs in features),
        num_projections=len(PROJECTIONS),
    )
