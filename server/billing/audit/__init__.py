"""The auditor: reads what the ledger says in more than one place, and names every difference.

It writes nothing, shares no sums with what it checks, and owns no state.
"""
