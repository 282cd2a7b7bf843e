"""`python -m bench.headlines`: measures batching and its KV, shared prefixes, goodput.

The plots are drawn beside the file of `--out`, and need the extra `bench`.
"""

from bench.experiment import main
from bench.headlines.batching import Batching
from bench.headlines.goodput import Goodput
from bench.headlines.shared_prefix import SharedPrefix

EXPERIMENTS = {
    "batching": Batching(),
    "shared-prefix": SharedPrefix(),
    "goodput": Goodput(),
}

if __name__ == "__main__":
    out = main("headlines", EXPERIMENTS, __doc__)
    if out:
        # Imported here, since measuring does not need matplotlib.
        from bench.headlines.plots import draw_all

        draw_all(out)
