"""`python -m bench.adapters`: measures memory, KV tokens, cold start, a storm of loads, and count.

`count`, the number of adapters, takes most of the time, and 5 GB of disk under the folder for
temporary files.
"""

from bench.adapters.cold_start import ColdStart
from bench.adapters.count import Count
from bench.adapters.kv_tokens import KVTokens
from bench.adapters.memory import Memory
from bench.adapters.storm import Storm
from bench.experiment import main

# `count` is last: the engines that it leaves behind poll for their fetcher until the process ends.
EXPERIMENTS = {
    "memory": Memory(),
    "kv_tokens": KVTokens(),
    "cold_start": ColdStart(),
    "storm": Storm(),
    "count": Count(),
}

if __name__ == "__main__":
    main("adapters", EXPERIMENTS, __doc__)
