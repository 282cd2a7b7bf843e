"""The CPU path: one set of operations (`interface`), computed in C or by torch."""
