"""The ledger measured: what is settled, exported, audited and verified in a second."""
