"""Money: holds, the ledger, prices, budgets, usage, receipts, exports, statements and the audit.

The package knows no HTTP and no model; it imports accounts, webhooks, limits, text and the
database. It owns every table of money; entries get into the ledger only through `entries`.
"""
