"""`python -m tests.engine.full_tmpfs DIR`, in a mount namespace: an engine on a disk that fills up.

The process prints its results as JSON.
"""

import json
import subprocess
import sys
from pathlib import Path

from engine.wire.records import EndRecord
from tests.engine.fakes import FakeClock, make_core, make_message, run_until_idle
from tests.engine.small_disk import make_journal


def main():
    directory = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", directory], check=True)
    clock = FakeClock()
    core = make_core(directory, journal=make_journal(directory, clock=clock))
    core.handle("gw", make_message(max_tokens=4000, prompt_len=1))
    received, failed = 0, []
    fill(directory / "filler")
    while core.scheduler.groups:
        outputs = [o for _, message in core.step() for o in message.outputs]
        received += sum(len(output.new_token_ids) for output in outputs)
        failed += [(o.request_id, o.stop_cause) for o in outputs if o.is_last]
    counted = sum(r.num_completion_tokens for r in ends(core))
    ((_, refused),) = core.handle("gw", make_message("r2"))
    fill(directory / "filler")  # takes the space that the reserve freed
    core.journal.close()
    core = make_core(directory, journal=make_journal(directory, clock=clock))
    restarted_full = core.journal.is_full
    (directory / "filler").unlink()
    clock.now += 1
    core.step()
    assert core.handle("gw", make_message("r3")) == []
    run_until_idle(core)
    result = {
        "failed": failed,
        "received": received,
        "counted": counted,
        "refused": refused.outputs[0].error,
        "restarted_full": restarted_full,
        "served_again": ends(core)[-1].stop_cause,
    }
    sys.stdout.write(json.dumps(result))


def ends(core):
    return [r for r in core.journal.read(0, 10).records if isinstance(r, EndRecord)]


def fill(path):
    """Write zeros to a file until the disk is full."""
    with path.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


if __name__ == "__main__":
    main()
