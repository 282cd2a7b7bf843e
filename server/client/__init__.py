"""Chorale's HTTP API from the other side: what the command line is made of.

It speaks HTTP and reads the user's files; of the server it imports only the formats of exports.
"""
