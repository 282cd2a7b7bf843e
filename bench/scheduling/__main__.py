"""`python -m bench.scheduling`: measures the scheduler's decisions, and its overhead.

Experiments are prefix cache, chunked prefill, fairness, preemption, and overhead.
"""

from bench.experiment import main
from bench.scheduling.chunked_prefill import ChunkedPrefill
from bench.scheduling.fairness import Fairness
from bench.scheduling.overhead import Overhead
from bench.scheduling.preemption import Preemption
from bench.scheduling.prefix_cache import PrefixCache

EXPERIMENTS = {
    "prefix": PrefixCache(),
    "chunked": ChunkedPrefill(),
    "fairness": Fairness(),
    "preemption": Preemption(),
    "overhead": Overhead(),
}

if __name__ == "__main__":
    main("scheduling", EXPERIMENTS, __doc__)
