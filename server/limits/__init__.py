"""Limits of requests at a time and of requests and tokens a minute, all checked in one step.

This room knows tenants, keys and adapters by ids only, and no web framework.
The state is one gateway's own (`memory`), or in Redis for several gateways (`shared`).
"""
