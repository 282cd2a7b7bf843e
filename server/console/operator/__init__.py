"""The operator's pages at `/console/operator`, for a session of the admin key."""
