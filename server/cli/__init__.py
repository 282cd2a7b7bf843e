"""The command line: one file a group of commands.

Everything that takes long to import is imported inside the command that needs it: `chorale --help`
answers at once. Only `serve` and `demo` start processes. `audit`, and `keys` where no server runs,
open the database; all other commands speak HTTP.
"""
