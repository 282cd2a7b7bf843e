"""`python -m bench.billing`: the cost of the bill: settling, exports, audit, verification.

Set TMPDIR to a folder on a real disk: in a folder in memory every commit is free.
"""

from bench.billing.reading import Reading
from bench.billing.settles import Settles
from bench.measurement import main

if __name__ == "__main__":
    main("bench.billing", {"billing.settles": Settles(), "billing.reading": Reading()}, __doc__)
