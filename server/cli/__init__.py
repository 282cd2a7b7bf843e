"""The command line, with one file for each group of commands.

Everything that takes long to import is imported inside the command that needs it, so that
`chorale --help` answers at once. Only `serve` and `demo` start processes. `audit` and
`keys reset-admin` open the database, `receipts verify` reads files, `doctor` looks at all that the
server uses; all other commands speak HTTP.
"""
