"""Padding of a stream's events, so that their sizes do not say how many tokens each has.

Encryption hides what an event says, but not its size. A step whose drafts were accepted says
several tokens in one event, and where drafts are accepted depends on the text: who sees the sizes
can tell what was asked (arXiv 2411.01076). A proxy that compressed a stream would undo the padding.
"""

from dataclasses import dataclass

from server.api.answers import LastEvent

ASKED_BYTES = 512
"""Size for clients that ask for it where the operator's is 0: an event of a few tokens has less."""
_END = b"}\n\n"


@dataclass(frozen=True, slots=True)
class Padding:
    """Makes the size of each event a multiple of `multiple_bytes`; 0 leaves events as they are."""

    multiple_bytes: int = 0

    def __bool__(self) -> bool:
        return self.multiple_bytes > 0

    def part(self, event: bytes) -> bytes:
        """An event of a JSON object, filled up in OpenAI's field `obfuscation`."""
        if not self:
            return event
        return self._filled(event.removesuffix(_END) + b',"obfuscation":"', b'"' + _END)

    def last(self, event: bytes) -> LastEvent:
        """The event that ends a stream, with a comment behind it, which clients skip."""
        return LastEvent(self._filled(event + b": ", b"\n\n") if self else event)

    def _filled(self, before: bytes, behind: bytes) -> bytes:
        num_missing = -(len(before) + len(behind)) % self.multiple_bytes
        return before + b"-" * num_missing + behind
