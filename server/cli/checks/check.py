"""One check: what it looks at, what it finds, and what to do about it."""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from registry.extras import ExtraMissing

TIMEOUT_S = 10.0
"""Longest time that a check may take."""
# Some drivers take passwords that have / and @ in them.
_PASSWORD = re.compile(r"(?<=://)\S*@")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check.   todo: what to do; "" if nothing has to be done."""

    verdict: Literal["ok", "warning", "wrong", "skipped"]
    found: str
    todo: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A check that has not been made yet.

    look: returns what it finds, one thing or several, or raises what is wrong.   todo: what to do
    if it raises, or does not end in time.
    """

    name: str
    look: Callable[[], Finding | list[Finding]]
    todo: str

    def run(self, timeout_s: float = TIMEOUT_S) -> list[Finding]:
        """The findings, each on one line and without the passwords of URLs."""
        found = [[Finding("wrong", f"There was no answer for {timeout_s:g} s.", self.todo)]]
        # A thread can be left behind in a call that does not return, as on a hung network volume.
        thread = threading.Thread(target=lambda: found.append(self._look()), daemon=True)
        thread.start()
        thread.join(timeout_s)
        lines = [(it, " ".join(it.found.split())) for it in found[-1]]
        return [replace(it, found=_PASSWORD.sub("***@", line)) for it, line in lines]

    def _look(self) -> list[Finding]:
        try:
            found = self.look()
            return found if isinstance(found, list) else [found]
        except ExtraMissing as error:
            return [Finding("wrong", str(error), error.remedy)]
        except Exception as error:
            # Whatever a part raises is what is wrong with it; the other checks go on.
            return [Finding("wrong", str(error) or type(error).__name__, self.todo)]
