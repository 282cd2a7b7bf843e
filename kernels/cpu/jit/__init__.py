"""Loops compiled by numba. Importing a module compiles it, or loads it from numba's cache."""
