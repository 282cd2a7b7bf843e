"""The CPU path: one set of operations (`interface`), computed by C, by numba, or by torch."""
