"""`chorale serve`: settings, secrets, and the processes that are started and kept running.

This room writes the configuration that each process reads at its start, and gives each no more than
it needs. It may import accounts, control files, text and the registry, and neither HTTP nor SQL.
It owns the data directory's configuration files and secrets.
"""
