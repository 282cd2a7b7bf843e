"""Regular expressions over module names, as in PEFT's configs, but safe to run for any tenant.

Python's `re` backtracks: a hostile pattern can take years on forty characters. Only the constructs
that configs really use are accepted, and the number of ways to match is bounded.
"""

import math
import re

from registry.errors import InvalidAdapter, shown

# Number of ways to match; `re` tries about as many in a millisecond or two.
MAX_WORK = 1 << 18
# Longest module name of a base model; a repeat can end at each of its characters.
_NAME_LENGTH = 64

_PLAIN = re.compile(r"[A-Za-z0-9_.-]*")
_TOKEN = re.compile(
    r"(?P<atom>[A-Za-z0-9_.-]|\\[.dwDW_-]|\[\^?(?:[A-Za-z0-9](?:-[A-Za-z0-9])?|\\[.dw]|[_.])+\])"
    r"|(?P<open>\((?:\?:)?)|(?P<close>\))|(?P<bar>\|)|(?P<anchor>[\^$])"
    r"|(?P<repeat>(?:[*+?]|\{\d{1,2}(?:,\d{0,2})?\})\??)"
)


class ModulePattern:
    """One pattern. work: upper bound of the number of ways to match it against one name."""

    def __init__(self, pattern: str, *, param: str) -> None:
        """Compile a pattern. Raises InvalidAdapter (unsupported_pattern) if unsafe or invalid."""
        self.pattern = pattern
        self.work = _bound_work(pattern, param)
        try:
            self._whole = re.compile(pattern)
            self._suffix = re.compile(rf"(.*\.)?({pattern})$")
        except re.error:
            raise _refused(pattern, param) from None
        # A match of a plain name ends in its last component, so most modules need no search.
        self._ending = pattern.rpartition(".")[2] if _PLAIN.fullmatch(pattern) else ""

    def matches_whole(self, module: str) -> bool:
        """Match the whole name, as PEFT does for target_modules and exclude_modules."""
        return self._whole.fullmatch(module) is not None

    def matches_suffix(self, module: str) -> bool:
        """Match the end of the name, as PEFT's get_pattern_key does for rank_ and alpha_pattern."""
        return module.endswith(self._ending) and self._suffix.match(module) is not None


def _bound_work(pattern: str, param: str) -> int:
    """Product of the branches of every group and the places where every repeat can end.

    Raises InvalidAdapter if the pattern is unsafe.
    """
    work = 1
    branches = [1]
    position, last = 0, "start"
    while position < len(pattern):
        token = _TOKEN.match(pattern, position)
        kind = token.lastgroup if token else None
        # Repeated groups and repeats of repeats are refused, since they have no small bound.
        if token is None or kind is None or (kind == "repeat" and last != "atom"):
            raise _refused(pattern, param)
        if kind == "open":
            branches.append(1)
        elif kind == "bar":
            branches[-1] += 1
        elif kind == "close" and len(branches) > 1:
            work *= branches.pop()
        elif kind == "repeat":
            work *= 2 if token[0] in ("?", "??") else _NAME_LENGTH
        if work > MAX_WORK:
            raise _refused(pattern, param)
        position, last = token.end(), kind
    work *= math.prod(branches)
    if work > MAX_WORK:
        raise _refused(pattern, param)
    return work


def _refused(pattern: str, param: str) -> InvalidAdapter:
    return InvalidAdapter(
        code="unsupported_pattern",
        message=f"{param} has the pattern {shown(pattern)}, which is not served; "
        "list the modules by name.",
        param=param,
    )
