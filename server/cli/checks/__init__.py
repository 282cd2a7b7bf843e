"""The checks of `chorale doctor`. Each leaves everything as it is, but for a probe that it deletes.

They use the parts of the server that they check, and open database, object store and Redis as the
gateway does.
"""
