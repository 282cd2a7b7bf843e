"""`python -m server.cluster.head ADDRESS_FILE`: the Ray cluster that `--ray local` brings along.

The placers of all base models join it at the address in the file, so that no two engines are given
the same cores and GPUs. The cluster ends with this process.
"""

import logging
import signal
import sys
import time
from pathlib import Path

import ray

from lora import log_lines
from registry.whole_files import write_whole

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
_OBJECT_STORE_BYTES = 80 << 20
"""Size of Ray's object store, about the least that Ray takes, since no object here is large. Ray's
own choice, a third of the memory, is refused where /dev/shm is a container's small one.
"""


def main() -> None:
    log_lines.begin("head")
    path = Path(sys.argv[1])
    path.unlink(missing_ok=True)
    context = ray.init(
        "local",
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    signals: list[int] = []
    # This handler is set after ray.init, which sets one of its own.
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    address = context.address_info["gcs_address"]
    write_whole(path, address.encode())
    logger.info("the cluster of this machine runs at %s", address)
    while not signals:
        time.sleep(_LOOK_S)
    ray.shutdown()


if __name__ == "__main__":
    main()
