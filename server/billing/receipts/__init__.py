"""Receipts: modules that make, sign, read and check them.

`receipt`, `signing`, `faults` and `check` need no database and no network, so that anybody with
receipts and the public keys can check them. `rows` and `signing_keys` use the tables of money.
"""
