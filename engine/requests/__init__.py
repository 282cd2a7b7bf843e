"""Requests in the engine, and what each of them asks of its answers."""
