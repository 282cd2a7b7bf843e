"""Exports: receipts as files in five formats, written and read back.

Only `pages`, `stream` and `schedules` need a database, so that anybody can read a file.
"""
