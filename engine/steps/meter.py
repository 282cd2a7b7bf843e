"""The runner's own count of what it computed, in a mapped file that outlives a killed engine.

The meter shares no code with the journal, since tests and the auditor compare the two.
"""

import mmap
import struct
from pathlib import Path

_FIELDS = struct.Struct("<4q")


class TokenMeter:
    """Token totals over all runs of one engine, and what its last step added to them.

    prompt_tokens: prompt positions computed.   sampled_tokens: tokens chosen.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_FIELDS.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FIELDS.size)
        self.prompt_tokens, self.sampled_tokens, _, _ = _FIELDS.unpack(self._map[:])

    @staticmethod
    def read(path: Path) -> tuple[int, int, int, int]:
        """Read (prompt tokens, sampled tokens, and what the last step added to each)."""
        return _FIELDS.unpack(path.read_bytes())

    def count(self, prompt_tokens: int, sampled_tokens: int) -> None:
        self.prompt_tokens += prompt_tokens
        self.sampled_tokens += sampled_tokens
        self._map[:] = _FIELDS.pack(
            self.prompt_tokens, self.sampled_tokens, prompt_tokens, sampled_tokens
        )
