"""What became of one request, whoever served it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Times in seconds from the start of the run.

    chunk_s: when each piece of the answer that carries tokens came.
    error: a code, None if it went well.
    """

    index: int
    model: str
    num_prompt_tokens: int
    due_s: float
    sent_s: float
    end_s: float
    chunk_s: tuple[float, ...]
    token_ids: tuple[int, ...]
    error: str | None = None

    @property
    def lag_s(self) -> float:
        """How late the generator itself was."""
        return self.sent_s - self.due_s

    # From when it was due, not sent: a late generator must not look like a fast server.
    @property
    def ttft_s(self) -> float:
        return self.chunk_s[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Between neighbouring chunks."""
        return [b - a for a, b in zip(self.chunk_s, self.chunk_s[1:], strict=False)]
