"""Money: holds, the ledger, prices, budgets, usage, receipts, exports, statements and the audit.

No HTTP here, and no model: it imports accounts, webhooks, limits, text and the database. It owns
every table of money; `entries` is the only way into the ledger.
"""
