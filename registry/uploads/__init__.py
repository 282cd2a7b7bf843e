"""Uploads: sessions that take an adapter's files, check and prove them, and become a version."""
