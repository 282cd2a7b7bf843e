"""Grammars by llguidance, whose calls release Python's lock while they work."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from engine.grammar.limits import MAX_GRAMMAR_BYTES, parser_limits
from engine.grammar.matcher import ConstraintFailed, Mask, mask_bytes


class LlguidanceGrammars:
    """Grammars over the tokens of a model folder's tokenizer.json.

    llguidance reads that file itself. Text that the grammar leaves no choice about gets the tokens
    that the tokenizer gives it, so a model sees what it was trained on.
    vocab_size: of the model's logits.   eos_token_ids: tokens that end an answer.
    """

    def __init__(self, path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._path = path
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)

    def compile(self, text: str) -> "LlguidanceMatcher":
        if len(text) > MAX_GRAMMAR_BYTES:
            raise ConstraintFailed(f"the grammar is longer than {MAX_GRAMMAR_BYTES} bytes")
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=parser_limits(text))
        return LlguidanceMatcher(matcher, self._vocab_size)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        # The table of tokens takes 0.2 s to build, which engines without grammars save.
        return LLTokenizer(str(self._path), n_vocab=self._vocab_size, eos_token=self._eos_token_ids)


class LlguidanceMatcher:
    """An answer's place in a grammar; see Matcher. Raises ConstraintFailed."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._check()

    def fork(self) -> "LlguidanceMatcher":
        return LlguidanceMatcher(self._matcher.deep_copy(), self._vocab_size)

    def consume(self, token_ids: Sequence[int]) -> None:
        self._matcher.consume_tokens(list(token_ids))
        self._check()

    def mask(self) -> Mask:
        found = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        mask = np.zeros(mask_bytes(self._vocab_size), dtype=np.uint8)
        # A tokenizer may have more tokens than the model, whose last ones it never chooses.
        most = min(len(found), len(mask))
        mask[:most] = found[:most]
        return mask

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintFailed(self._matcher.get_error().partition("\n")[0])
