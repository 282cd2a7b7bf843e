"""`python -m bench.engine`: our engine with a burst for many adapters, by kernels, precision,
number of distinct adapters, and `batch_invariant`.

`bound`: only the matrix products of the same steps, by the fastest library, on one thread. Exit
status 1: a row is not valid (`bench.peers` says when).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.bound import Products
from bench.checkpoint import THREADS
from bench.engine.chorale import Chorale
from bench.measurement import Row, main
from bench.peers.measure import BurstMeasurement
from bench.report import rate, rounded

_SYSTEMS = {
    # Only C multiplies with 4 bits; torch computes with the float32 numbers they stand for.
    "C": Chorale("native", ("float32", "int8", "int4")),
    "torch": Chorale("torch", ("float32",)),
    "C-invariant": Chorale("native", ("float32",), is_invariant=True),
}
_COST_OF_INVARIANCE = (16,)
"""Numbers of adapters in rows with `batch_invariant`; its cost does not depend on them."""


@dataclass(frozen=True, kw_only=True)
class Engine(BurstMeasurement):
    """Systems: the keys of _SYSTEMS."""

    def rows(self, bench: str, folder: Path) -> Iterator[Row]:
        burst = self.bench(folder)
        products = Products(burst.checkpoint.model_dir, THREADS)
        for name in self.systems or _SYSTEMS:
            system = _SYSTEMS[name]
            counts = _COST_OF_INVARIANCE if system.is_invariant else None
            for row, setup, result in burst.rows(system, counts):
                if setup["precision"] == "float32" and "failed" not in result:
                    products_s = products.seconds(system.steps)
                    result["bound"] = {
                        "products_cpu_s": rounded(products_s),
                        "output_tokens_per_cpu_s": rate(result["output_tokens"], products_s),
                        "share": rate(products_s, result["cpu_s"]),
                    }
                yield row.replace("peers", "engine"), setup, result


if __name__ == "__main__":
    main("bench.engine", {"engine": Engine()}, __doc__)
