"""A release with one more migration than this one."""

import shutil
from pathlib import Path

from server.database.config import MIGRATIONS

_NEXT = """
import sqlalchemy as sa
from alembic import op

revision = "9999"
down_revision = "{before}"


def upgrade() -> None:
    op.add_column("tenants", sa.Column("nickname", sa.Text(), server_default="none"))
    op.create_table("nicknames", sa.Column("nickname", sa.Text(), primary_key=True))
{then}
"""


def make_next_release(folder: Path, then: str = "") -> Path:
    """A folder of all migrations and a next one, 9999: a column, a table, and a line of Python."""
    shutil.copytree(MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    versions = folder / "versions"
    before = max(path.name for path in versions.glob("*.py")).partition("_")[0]
    (versions / "9999_nicknames.py").write_text(_NEXT.format(before=before, then=f"    {then}"))
    return folder
