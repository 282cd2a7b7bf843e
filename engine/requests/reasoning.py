"""A limit on the reasoning that an answer begins with: vLLM's `thinking_token_budget`."""

from engine.wire.messages import ReasoningBudget


class Reasoning:
    """How far an answer has come in its reasoning.

    There is one part of it, at the beginning: then the tokens that open one are banned. Marks are
    found in the text, since a model may write them in other tokens than its tokenizer.
    num_tokens: those between the marks.   is_open, is_over: whether the part has begun, and ended.
    """

    def __init__(self, budget: ReasoningBudget) -> None:
        self._budget = budget
        self._words = dict(budget.words)
        self._text = b""
        self._num_forced = 0
        self.num_tokens = 0
        self.is_open, self.is_over = budget.is_begun, False

    def push(self, token_id: int, known: bytes) -> None:
        """Take the answer's next token.   known: its bytes in the engine's vocabulary."""
        if self.is_over:
            return
        budget = self._budget
        self._text += self._words.get(token_id, known)
        if not self.is_open:
            self._text = self._text.lstrip()
            self.is_open = self._text.startswith(budget.opens)
            may_open = any(mark.startswith(self._text) for mark in budget.opens)
            self.is_over = not self.is_open and not may_open
            return
        is_forced = token_id == self.forced
        self._num_forced = (self._num_forced + 1) % len(budget.closing) if is_forced else 0
        self.num_tokens += 1
        self.is_over = any(mark in self._text for mark in budget.closes)
        self._text = self._text[-max(map(len, budget.closes)) :]

    @property
    def forced(self) -> int | None:
        """The only token that may come next, once there is no more to think."""
        is_spent = self.is_open and not self.is_over and self.num_tokens >= self._budget.max_tokens
        return self._budget.closing[self._num_forced] if is_spent else None

    @property
    def banned(self) -> tuple[int, ...]:
        """Tokens that would open another part."""
        is_late = self.is_open or self.is_over or not self._budget.max_tokens
        return self._budget.opening if is_late else ()

    def may_change_within(self, num_tokens: int) -> bool:
        """Whether `forced` or `banned` may be others behind so many tokens, or are not known."""
        num_left = self._budget.max_tokens - self.num_tokens if self.is_open else 0
        return not self.is_over and num_left <= num_tokens
