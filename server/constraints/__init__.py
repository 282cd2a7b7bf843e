"""Constraints of answers, as requests demand them: checked, and compiled to llguidance's form.

This room knows tenants by id only, and no web framework. Engines compile what they are sent again.
"""
