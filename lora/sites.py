"""The places of a model where adapters apply, as one of its ranks sees them."""

from kernels.tiles import RANK_ROWS
from kernels.work import Site
from lora.layout import CUT_BY_INPUTS, PROJECTIONS, ModelShape
from lora.shard import WHOLE, Shard


def site_of(
    shape: ModelShape, layer: int, projections: tuple[int, ...], shard: Shard = WHOLE
) -> Site:
    """shape: of the whole model.   projections: that share their input, side by side.

    Of what is cut by inputs, `in_features` and `out_features` are the rank's parts of both, though
    its product has all outputs: this rank adds to its own of them.
    """
    features = [shape.features(projection) for projection in projections]
    by_inputs = projections[0] in CUT_BY_INPUTS
    a_rows = RANK_ROWS if by_inputs else RANK_ROWS // shard.size
    num_inputs = features[0][0]
    return Site(
        layer=layer,
        projections=projections,
        in_features=num_inputs // shard.size if by_inputs else num_inputs,
        out_features=tuple(num_outputs // shard.size for _, num_outputs in features),
        num_projections=len(PROJECTIONS),
        a_rows=a_rows,
        first_row=0 if by_inputs else shard.index * a_rows,
    )
