"""How much work a grammar may cause; gateways and engines have the same limits.

With llguidance's default limits one mask of `s: s s | "a" | "b"` takes 2.5 seconds. With these a
mask of a grammar was seen to take 30 ms at most, and of a schema 140 ms.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_GRAMMAR_BYTES = 256 << 10
"""Longest grammar in llguidance's own form."""
COMPILE_BUDGET_S = 1.0
"""Processor time of a compilation after which the grammar counts as too slow."""
TOOLS = "tools"
"""The name of a grammar of tool calls, which is made of schemas."""


def parser_limits(grammar: str) -> "LLParserLimits":
    """Limits of a grammar's size, and of one step of its parser and its lexer.

    grammar: in llguidance's own form. Schemas may have more of the parser's items, as 1,000
    optional properties have 4,000 in a row; an item of a schema is less work than one of a grammar.
    """
    # The engine runs without llguidance, too, and then refuses grammars.
    from llguidance import LLParserLimits

    is_schema = any(form in grammar[:40] for form in ('"json_schema"', f'"name": "{TOOLS}"'))
    return LLParserLimits(
        step_max_items=60_000 if is_schema else 3_000,
        max_items_in_row=8_000 if is_schema else 2_000,
        step_lexer_fuel=20_000,
        initial_lexer_fuel=200_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )
