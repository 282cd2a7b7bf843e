"""Measures the product from outside, over HTTP, beside its peers. Nothing imports it."""
