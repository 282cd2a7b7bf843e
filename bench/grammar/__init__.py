"""Costs of structured output: beside free answers, by schema, and by costly grammars."""
