"""How much anyone may ask for at once and in a minute: decided here, in one step for all limits.

Knows tenants, keys and adapters by ids only; no web framework.
The state is one gateway's own (`memory`), or in Redis for several (`shared`).
"""
