"""Names and versions of adapters, and who may use them: aliases, offers, grants, pins."""
