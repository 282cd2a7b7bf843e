"""The registry measured: uploads, their checks and proofs, and lists of many adapters."""
