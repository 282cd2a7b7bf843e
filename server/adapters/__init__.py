"""The gateway's side of the registry: uploads on their way, what a name means, news for engines.

It imports the registry, accounts, the engines' pool and the database. Its state is the registry's
tables; files of an upload lie in a folder of each gateway until they are stored.
"""
