"""Proofs that an adapter, as it is served, gives what its merged weights give."""
