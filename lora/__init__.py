"""Residency of adapter weights: which tier each adapter is in, and how a batch applies it.

The package holds the tiers from the object store to the arena, residency by digest, and the tile
tables. The manager records which adapter is in which tier; only the loader's thread touches files,
and only the fetcher process touches the object store.
"""
