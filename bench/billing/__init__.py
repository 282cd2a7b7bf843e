"""Measurements of the ledger: how much is settled, exported, audited and verified in a second."""
