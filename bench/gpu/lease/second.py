"""The second command: failed kernels under other compilers, or else the whole product."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from bench.gpu.lease import compilers, product
from bench.gpu.lease.lease import Lease
from bench.gpu.lease.parts import Part

_OF_KERNELS = ("kernels.", "whole_numbers.")


def failed_kernels(entries: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the checks of kernels that failed or hung, with the seeds that they had.

    entries: of the first command's record.
    """
    return {
        entry["check"]: entry["seed"]
        for entry in entries
        if entry.get("check", "").startswith(_OF_KERNELS) and entry["ended"] in ("failed", "killed")
    }


def parts_of(lease: Lease) -> Iterator[Part]:
    """Choose by what the first command has found."""
    entries = lease.record.entries("first")
    failed = failed_kernels(entries)
    if failed:
        lease.record.say(f"{len(failed)} checks of kernels have failed: other compilers are tried")
        yield Part("compilers", 150, partial(compilers.try_compilers, lease, failed))
        yield Part("sanitizer", 235, partial(compilers.sanitize, failed))
    else:
        why = "no check of a kernel has failed" if entries else "no first command has left a record"
        lease.record.say(f"{why}: the whole product is tried")
        yield Part("prepare", 60, partial(product.prepare, lease))
        yield Part("product", 235, partial(product.show_product, lease))
