"""Formats of quantised checkpoints. Each reads the tensors of a module as a `Weight`; nothing else
in the engine knows a format.
"""
