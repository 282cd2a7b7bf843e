"""Receipts as files, in five formats, written and read back.

All but `pages` and `stream` without a database: whoever has a file can read it.
"""
