"""Chorale's HTTP API from the other side: what the command line is made of.

It speaks HTTP and reads the user's files; nothing of the server is imported here.
"""
