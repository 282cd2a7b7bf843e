"""Chorale's engine with a burst of requests to many adapters, by kernels and precision."""
