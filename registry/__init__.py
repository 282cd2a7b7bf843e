"""What an adapter is: the canonical object and its digest, the checks, versions, aliases, stores.

It may touch SQL through a connection handed in, and object stores. No torch, no web framework.
"""
