"""Webhooks: the URLs that tenants register, the events sent to them, and their delivery.

The package imports the database and text. It owns the tables of webhooks and of their events.
"""
