"""`python -m bench.registry`: measures checks of uploads, listing, time to serve, throughput.

The last experiment, `upload_2gb`, takes 12 GB of disk under the folder for temporary files, and
8 GB of memory.
"""

from bench.experiment import main
from bench.registry.listing import Listing
from bench.registry.servable import Servable
from bench.registry.upload import Upload
from bench.registry.validation import Validation

EXPERIMENTS = {
    "validation": Validation(),
    "listing": Listing(),
    "servable": Servable(),
    "upload": Upload(),
    "upload_2gb": Upload(stack="deep-730m", ways=("gateway to folder",), repeats=1),
}

if __name__ == "__main__":
    main("registry", EXPERIMENTS, __doc__)
