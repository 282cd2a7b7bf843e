"""Alembic migrations of the one database; they know tables and nothing else."""
