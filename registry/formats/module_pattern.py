"""Regular expressions over module names, as in PEFT's configs, but safe to run for any tenant.

PEFT matches with Python's `re`, which backtracks: a hostile pattern can take years on forty
characters. Here RE2 matches, in time linear in the name.
"""

import re
import warnings
from dataclasses import dataclass, field
from typing import Any

import re2

from registry.errors import shown
from registry.formats.peft_format import file_fault

_MAX_PROGRAM_BYTES = 1 << 16
_PLAIN = re.compile(r"[A-Za-z0-9_.-]*")
# RE2 reads these in another way than Python.
_AMBIGUOUS = re.compile(r"\{,|\[\^?\]?\[:")


@dataclass(frozen=True, slots=True)
class ModulePattern:
    """A pattern that RE2 and Python understand alike.

    compiled: the pattern in its form.   ending: with which a name has to end; a match of a plain
    name ends in its last component, so most modules need no search.
    """

    text: str
    compiled: Any = field(compare=False)
    ending: str = field(compare=False)

    def matches(self, module: str) -> bool:
        """Match the whole name."""
        return module.endswith(self.ending) and self.compiled.fullmatch(module) is not None

    def layer(self, module: str) -> int | None:
        """The number that the group `layer` has where the pattern matches the name's beginning."""
        match = self.compiled.match(module)
        # A pattern with "|" may match without the group.
        return int(match["layer"]) if match and match["layer"] else None


WHOLE = "{}"
"""Form in which target_modules and exclude_modules match: the whole name, as in PEFT."""
SUFFIX = r"(.*\.)?({})$"
"""Form in which rank_pattern and alpha_pattern match: the end, as in PEFT's get_pattern_key."""


def read_pattern(text: str, param: str, form: str = WHOLE) -> ModulePattern | None:
    """Compile a pattern; None if it cannot be matched in linear time (lookaround, references).

    Raises InvalidAdapter (unsupported_pattern) if Python has no such pattern either.
    """
    whole = form.format(text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            re.compile(text)
            re.compile(whole)
    except (re.error, RecursionError, OverflowError):
        message = f"{param} has {shown(text)}, which is no regular expression; list the modules "
        raise file_fault("unsupported_pattern", f"{message}by name", param) from None
    if _AMBIGUOUS.search(text):
        return None
    options = re2.Options()
    options.max_mem, options.log_errors = _MAX_PROGRAM_BYTES, False
    try:
        compiled = re2.compile(whole, options)
    except (re2.error, UnicodeEncodeError):  # The latter is half a character, as JSON may have it.
        return None
    ending = text.rpartition(".")[2] if _PLAIN.fullmatch(text) else ""
    return ModulePattern(text, compiled, ending)
