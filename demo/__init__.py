"""The demo's base model and adapters, and the recipe that makes them offline.

Reads only what every Python ships; writes only the folder it is told, by default this one
(`model/` and `adapters/`).
Imports nothing else of the project and is imported by nothing but its tests.
"""
