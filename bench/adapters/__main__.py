"""`python -m bench.adapters`: serving thousands of adapters: cold start, a storm of loads, count.

`count`, the number of adapters, takes most of the time, and 5 GB of disk under TMPDIR.
"""

from bench.adapters.cold_start import ColdStart
from bench.adapters.count import Count
from bench.adapters.storm import Storm
from bench.measurement import main

# `count` is last: the engines that it leaves behind poll for their fetcher until the process ends.
MEASUREMENTS = {
    "adapters.cold_start": ColdStart(),
    "adapters.storm": Storm(),
    "adapters.count": Count(),
}

if __name__ == "__main__":
    main("bench.adapters", MEASUREMENTS, __doc__)
