"""The gateway: the only process a customer talks to.

Keys, limits, names, text and money live here; the engine sees token ids and digests. The gateway
imports neither torch nor a model library. All state is in the SQL database; each process owns only
caches of it.
"""
