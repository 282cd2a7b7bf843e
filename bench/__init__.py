"""Benchmarks of the product, beside its peers. No code of the product imports them."""
