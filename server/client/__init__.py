"""The client of Chorale's HTTP API, which the command line uses.

This room speaks HTTP and reads the user's files; of the server it imports only the formats of
exports.
"""
