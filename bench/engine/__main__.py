"""`python -m bench.engine`: our engine on the burst of bench.multi_lora, a JSON line per setup.

Setups differ in kernels (C, torch), precision, number of distinct adapters, and
`batch_invariant`. `bound`: only the matrix products of the same steps, by the fastest library, on
one thread. With `--threads 1 2`, one engine of two threads also takes turns with two of one thread.
Exit status 1: a row is not valid (`bench.peers` says when).
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.bound import Products
from bench.engine.chorale import Chorale
from bench.engine.side_by_side import compare
from bench.peers.measure import Plan, Row, measure
from bench.peers.options import add_burst_options, make_plan
from bench.peers.rows import write_rows
from bench.report import rate, rounded

_SYSTEMS = {
    # Only C multiplies with codes; torch computes with the float32 numbers that they stand for.
    "C": Chorale("native", ("float32", "int8", "int4")),
    "torch": Chorale("torch", ("float32",)),
    "C-invariant": Chorale("native", ("float32",), is_invariant=True),
}
_COST_OF_INVARIANCE = (16,)
"""Numbers of adapters in rows with `batch_invariant`; its cost does not depend on them."""


def main() -> None:
    options = parse_options(sys.argv[1:])
    sys.exit(not write_rows(run(options), options.out))


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.engine", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_burst_options(parser)
    parser.add_argument(
        "--only", choices=_SYSTEMS, action="append", help="run just this; may be repeated"
    )
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> Iterator[Row]:
    """Yields each row as soon as it is measured."""
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        plan = make_plan(options, Path(temporary))
        products = Products(plan.checkpoint.model_dir, threads=1)
        for name in options.only or _SYSTEMS:
            yield from _measure(_SYSTEMS[name], plan, products)
        if not options.only or "C" in options.only:
            yield from _compare(_SYSTEMS["C"], plan)


def _measure(system: Chorale, plan: Plan, products: Products) -> Iterator[Row]:
    counts = _COST_OF_INVARIANCE if system.is_invariant else plan.num_adapters
    for bench, setup, result in measure(system, replace(plan, num_adapters=counts)):
        if setup["precision"] == "float32":
            products_s = products.seconds(system.steps)
            result["bound"] = {
                "products_cpu_s": rounded(products_s),
                "output_tokens_per_cpu_s": rate(result["output_tokens"], products_s),
                "share": rate(products_s, result["cpu_s"]),
            }
        yield bench.replace("peers", "engine"), setup, result


def _compare(system: Chorale, plan: Plan) -> Iterator[Row]:
    for precision in system.precisions:
        for threads in plan.threads:
            if threads > 1 and (not plan.precisions or precision in plan.precisions):
                yield compare(system, plan, precision, threads)


if __name__ == "__main__":
    main()
