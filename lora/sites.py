"""The places of a model where adapters apply, as one of its ranks sees them."""

from collections.abc import Iterator

from kernels.work import Site
from lora.layout import PROJECTIONS, Layout, ModelShape
from registry.formats.peft_format import MAX_ADDED_TOKENS

_MOST_PROJECTIONS = 3
"""Number of projections of a site that all kernels take at once."""


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


def head_sites(layout: Layout) -> Iterator[tuple[range, Site]]:
    """The sites of the head, each with the tokens whose logits it adds to."""
    places, chunks = layout.head_places, layout.chunks
    first = 0
    while first < len(places):
        layer, number = places[first]
        # The places of a site are in one layer of the tables.
        count = min(_MOST_PROJECTIONS, len(PROJECTIONS) - number, len(places) - first)
        own = chunks[first : first + count]
        yield (
            range(own[0].start, own[-1].stop),
            Site(
                layer=layer,
                projections=tuple(range(number, number + count)),
                in_features=layout.shape.hidden_size,
                out_features=tuple(map(len, own)),
                num_projections=len(PROJECTIONS),
            ),
        )
        first += count


def embedding_sites(layout: Layout) -> Iterator[tuple[range, Site]]:
    """The sites of the embedding, one for each chunk, each with the chunk's tokens; that of added
    tokens is the last.
    """
    first = layout.vocab_size
    chunks = (*layout.chunks, range(first, first + MAX_ADDED_TOKENS))
    places = (*layout.embedding_places, layout.added_places[1])
    for tokens, (layer, number) in zip(chunks, places, strict=True):
        yield (
            tokens,
            Site(layer, (number,), len(tokens), (layout.shape.hidden_size,), len(PROJECTIONS)),
        )


def added_head_site(layout: Layout) -> Site:
    """The site of the head for tokens that adapters add."""
    layer, number = layout.added_places[0]
    hidden = layout.shape.hidden_size
    return Site(layer, (number,), hidden, (MAX_ADDED_TOKENS,), len(PROJECTIONS))
