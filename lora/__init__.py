"""Where an adapter's weights are, and how they are applied to a batch.

Tiers from the object store to the arena, residency by digest, tile tables. The manager owns what is
where; only the loader's thread touches files, and only the fetcher process the object store.
"""
