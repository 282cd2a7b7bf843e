"""The CPU path: one set of operations (`plain`), computed in C or by torch."""
