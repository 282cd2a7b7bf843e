"""The console at `/console`: pages for tenants and for the operator, over the functions of the API.

Pages are rendered here, from what routes of the API read; changes are made by the API itself, which
takes a session of the console in place of a key. Nothing imports this room but the gateway's start.
"""
