"""Engines on a Ray cluster: a placer beside each gateway, one coordinator, an actor for each
engine, and what runs on its node. Only placer, coordinator and actor import Ray.
"""
