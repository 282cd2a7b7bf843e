"""Tool calls and reasoning parts: one description of a model's format, its parser and its grammar.

This room knows no tenants and no web framework, and owns no state.
"""
