"""The gateway: the only process a customer talks to.

Keys, limits, names, text and money live here; the engine sees token ids and digests. It imports
neither torch nor a model library. State is the SQL database's; each process owns only caches of it.
"""
