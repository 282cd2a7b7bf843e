"""The loops that numba compiles. Importing them compiles them, or finds them compiled."""
