"""Tenants, their API keys, and the identity behind a key; the operator's key; the audit log.

This room imports limits (a tenant and a key have some) and the database. It owns the tables of
tenants and keys; each gateway has a short cache of identities of its own.
"""
