"""A package, so that the stack of its conftest.py ends with its last test."""
