"""Webhooks: where tenants want to hear of things, what they are told, and how it is delivered.

It imports the database and text. It owns the tables of webhooks and of their events.
"""
