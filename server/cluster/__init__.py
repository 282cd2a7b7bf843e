"""Engines on a Ray cluster: a placer beside each gateway, one coordinator, an actor for each
engine, and the processes on the engine's node. Only placer, coordinator and actor import Ray.
"""
