"""Parts of a command: each has a limit and a process group, and leaves a closing line."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench import child
from bench.gpu.lease.lease import Lease

_LEAST_S = 1.0


@dataclass(frozen=True)
class Part:
    """A piece of a command's work.

    until_s: when it is killed, in seconds from the start of the command; it begins as soon as the
    part before it has ended.   checks: names of the checks that it notes in the record.
    """

    name: str
    until_s: float
    work: Callable[[], object]
    checks: tuple[str, ...] = ()


def run_parts(parts: Sequence[Part], lease: Lease, start_s: float) -> list[str]:
    """Run the parts in order, and return their closing lines.   start_s: on the monotonic clock."""
    record, closing = lease.record, []
    for part in parts:
        num_noted = len(record.entries(record.command))
        limit_s = max(_LEAST_S, start_s + lease.limit_s(part.until_s) - time.monotonic())
        with record.open_log() as log:
            log.write(f"\n--- {part.name}: at most {limit_s:.0f} s ---\n")
            log.flush()
            ended = child.run(part.work, limit_s, log)
        noted = record.entries(record.command)[num_noted:]
        for name in part.checks:
            if all(entry.get("check") != name for entry in noted):
                noted.append({"check": name, "ended": "dropped"})
                record.note(**noted[-1])
        record.note(part=part.name, ended=ended.how, seconds=round(ended.seconds, 1))
        closing.append(f"{part.name}  {ended.how}  {ended.seconds:.1f} s")
        record.say(closing[-1])
        for entry in noted:
            if entry["ended"] != "ok":
                record.say(f"    {entry['check']}  {entry['ended']}")
    return closing
