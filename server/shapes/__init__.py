"""Shapes that a request demands of its answers: checked, and compiled once to llguidance's form.

This room knows tenants by id only, and no web framework. Engines compile what they are sent again.
"""
