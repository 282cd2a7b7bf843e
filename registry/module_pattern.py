"""Regular expressions over module names, as in PEFT's configs, but safe to run for any tenant.

PEFT matches with Python's `re`, which backtracks: a hostile pattern can take years on forty
characters. Here RE2 matches, in time linear in the name.
"""

import re
import warnings
from dataclasses import dataclass, field
from typing import Any

import re2

from registry.errors import InvalidAdapter, shown

_MAX_PROGRAM_BYTES = 1 << 16
_PLAIN = re.compile(r"[A-Za-z0-9_.-]*")
# RE2 reads these in another way than Python.
_AMBIGUOUS = re.compile(r"\{,|\[\^?\]?\[:")


@dataclass(frozen=True, slots=True)
class ModulePattern:
    """A pattern that RE2 and Python understand alike.

    whole, suffix: the pattern compiled for a name, and for the end of a name.   ending: with which
    a name has to end; a match of a plain name ends in its last component, so most modules need no
    search.
    """

    text: str
    whole: Any = field(compare=False)
    suffix: Any = field(compare=False)
    ending: str = field(compare=False)

    @classmethod
    def compile(cls, text: str) -> "ModulePattern":
        """Compile a pattern. Raises ValueError if RE2 has no such construct, or too little room."""
        if _AMBIGUOUS.search(text):
            raise ValueError(text)
        options = re2.Options()
        options.max_mem, options.log_errors = _MAX_PROGRAM_BYTES, False
        try:
            whole = re2.compile(text, options)
            suffix = re2.compile(rf"(.*\.)?({text})$", options)
        except re2.error as error:
            raise ValueError(text) from error
        ending = text.rpartition(".")[2] if _PLAIN.fullmatch(text) else ""
        return cls(text, whole, suffix, ending)

    def matches_whole(self, module: str) -> bool:
        """Match the whole name, as PEFT does for target_modules and exclude_modules."""
        return self.whole.fullmatch(module) is not None

    def matches_suffix(self, module: str) -> bool:
        """Match the end of the name, as PEFT's get_pattern_key does for rank_ and alpha_pattern."""
        return module.endswith(self.ending) and self.suffix.match(module) is not None

    def layer(self, module: str) -> int | None:
        """The number that the group `layer` has where the pattern matches the name's beginning."""
        match = self.whole.match(module)
        return int(match["layer"]) if match else None


def read_pattern(text: str, param: str) -> ModulePattern | None:
    """Compile a pattern; None if it cannot be matched in linear time (lookaround, references).

    Raises InvalidAdapter (unsupported_pattern) if Python has no such pattern either.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            re.compile(text)
            re.compile(rf"(.*\.)?({text})$")
    except (re.error, RecursionError, OverflowError):
        raise InvalidAdapter(
            code="unsupported_pattern",
            message=f"{param} has {shown(text)}, which is no regular expression; list the modules "
            "by name.",
            param=param,
        ) from None
    try:
        return ModulePattern.compile(text)
    except ValueError:
        return None
