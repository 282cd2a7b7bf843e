"""Receipts: made, signed, read from the database, and checked.

`receipt`, `signing`, `faults` and `check` need no database and no network: whoever has receipts and
the public keys can check them. `rows` and `signing_keys` read the tables of money.
"""
