"""Measurements of the registry: uploads, their checks and proofs, and lists of many adapters."""
