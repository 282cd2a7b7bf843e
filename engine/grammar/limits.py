"""How much work a grammar may cause; gateways and engines have the same limits.

With llguidance's default limits one mask of `s: s s | "a" | "b"` takes 2.5 seconds; with these the
worst of the grammars in bench/grammar takes some milliseconds, or the grammar is refused.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_GRAMMAR_BYTES = 256 << 10
"""Longest grammar in llguidance's own form."""
COMPILE_BUDGET_S = 1.0
"""Processor time of a compilation after which the grammar counts as too slow."""


def parser_limits() -> "LLParserLimits":
    """Limits of a grammar's size, and of one step of its parser and its lexer."""
    # The engine runs without llguidance, too, and then refuses grammars.
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_max_items=3_000,
        max_items_in_row=2_000,
        step_lexer_fuel=20_000,
        initial_lexer_fuel=200_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )
