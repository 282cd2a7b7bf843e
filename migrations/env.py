"""Alembic's entry: runs on the connection that it is given, within its transaction."""

from alembic import context

from registry.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, compare_type=True)
with context.begin_transaction():
    context.run_migrations()
