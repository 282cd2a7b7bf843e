"""Tenants, their API keys, and who asks; the operator's key; the audit log.

It imports limits (a tenant and a key have some) and the database. It owns the tables of tenants and
keys; a short cache of identities is each gateway's own.
"""
