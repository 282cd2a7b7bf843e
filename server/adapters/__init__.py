"""The gateway's side of the registry: uploads in progress, model names, adapter events for engines.

The package imports the registry, accounts, the engine pool and the database. Its state is in the
registry's tables; an upload's files lie in a folder of the gateway until the object is stored.
"""
