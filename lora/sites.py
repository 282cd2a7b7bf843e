"""The places of a model where adapters apply, as one of its ranks sees them."""

from kernels.work import Site
from lora.layout import PROJECTIONS, ModelShape


def site_of(shape: ModelShape, layer: int, projections: tuple[int, ...]) -> Site:
    """Describe the site of some projections in a layer for the kernels.

    shape: the rank's shard of the model.   projections: they share their input, and their outputs
    lie side by side.
    """
    features = [shape.features(projection) for projection in projections]
    return Site(
        layer=layer,
        projections=projections,
        in_features=features[0][0],
        out_features=tuple(num_outputs for _, num_outputs in features),
        num_projections=len(PROJECTIONS),
    )
