"""Alembic migrations of the database; they import tables and nothing else of the project."""
