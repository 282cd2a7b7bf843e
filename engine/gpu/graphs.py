"""Steps of decodes as captured graphs: one for each number of rows, with adapters and without."""

from bisect import bisect_left
from collections.abc import Callable, Iterator

from engine.gpu.inputs import StepShape


class DecodeGraphs:
    """max_num_seqs: rows of a step. A step is padded to the next number that has a graph."""

    def __init__(self, max_num_seqs: int) -> None:
        self.sizes = list(_sizes(max_num_seqs))
        self._graphs: dict[StepShape, Callable[[], None]] = {}

    def shape(self, num_rows: int, has_lora: bool) -> StepShape | None:
        """The shape whose graph runs so many rows; None where there is none."""
        at = bisect_left(self.sizes, num_rows)
        if at == len(self.sizes):
            return None
        return StepShape.of_decodes(self.sizes[at], has_lora)

    def capture(self, capture: Callable[[StepShape], Callable[[], None]]) -> None:
        """Ask `capture` for all of them, the largest first: the others fit into its memory."""
        for size in reversed(self.sizes):
            for has_lora in (True, False):
                shape = StepShape.of_decodes(size, has_lora)
                self._graphs[shape] = capture(shape)

    def find(self, shape: StepShape) -> Callable[[], None] | None:
        """What launches the step's graph; None where it has none."""
        return self._graphs.get(shape)


def _sizes(most: int) -> Iterator[int]:
    """1, 2, 4, then every 8th up to 256, every 32nd beyond, and `most`."""
    size = 1
    while size < most:
        yield size
        size = 2 * size if size < 8 else size + (8 if size < 256 else 32)
    yield most
