"""Regular expressions over module names, as PEFT's config has them, but safe to run for a stranger.

Python's `re` backtracks: a hostile pattern can take years on forty characters. We accept the
constructs that configs really use and bound how many ways there are to match.
"""

import math
import re

from registry.errors import InvalidAdapter, shown

# About what `re` tries in a millisecond or two.
MAX_WORK = 1 << 18
# No module name of a base model is longer; a repeat can end at each of its characters.
_NAME_LENGTH = 64

_PLAIN = re.compile(r"[A-Za-z0-9_.-]*")
_TOKEN = re.compile(
    r"(?P<atom>[A-Za-z0-9_.-]|\\[.dwDW_-]|\[\^?(?:[A-Za-z0-9](?:-[A-Za-z0-9])?|\\[.dw]|[_.])+\])"
    r"|(?P<open>\((?:\?:)?)|(?P<close>\))|(?P<bar>\|)|(?P<anchor>[\^$])"
    r"|(?P<repeat>(?:[*+?]|\{\d{1,2}(?:,\d{0,2})?\})\??)"
)


class ModulePattern:
    """One pattern. work: a bound on the number of ways to try it on one name."""

    def __init__(self, pattern: str, *, param: str) -> None:
        """Raises InvalidAdapter (unsupported_pattern) for what is not safe or not a pattern."""
        self.pattern = pattern
        self.work = _bound_work(pattern, param)
        try:
            self._whole = re.compile(pattern)
            self._suffix = re.compile(rf"(.*\.)?({pattern})$")
        except re.error:
            raise _refused(pattern, param) from None
        # Of a plain name, what a match must end in: most modules need no search.
        self._ending = pattern.rpartition(".")[2] if _PLAIN.fullmatch(pattern) else ""

    def matches_whole(self, module: str) -> bool:
        """As PEFT reads target_modules and exclude_modules."""
        return self._whole.fullmatch(module) is not None

    def matches_suffix(self, module: str) -> bool:
        """As PEFT reads the keys of rank_pattern and alpha_pattern (get_pattern_key)."""
        return module.endswith(self._ending) and self._suffix.match(module) is not None


def _bound_work(pattern: str, param: str) -> int:
    """Branches of every group multiplied, times the places where every repeat can end."""
    work = 1
    branches = [1]
    position, last = 0, "start"
    while position < len(pattern):
        token = _TOKEN.match(pattern, position)
        kind = token.lastgroup if token else None
        # A repeated group or a repeat of a repeat has no small bound.
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
