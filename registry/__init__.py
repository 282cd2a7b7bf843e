"""The registry: canonical objects and digests, checks, uploads, versions, aliases, object stores.

The package uses SQL only through a connection that its caller passes, and object stores. It imports
neither torch nor a web framework.
"""
