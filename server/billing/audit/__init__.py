"""The audit: compares values that the ledger keeps in more than one place, and names differences.

The checks write nothing, share no sums with the code that they check, and own no state.
"""
