"""A gateway that is about to end takes no requests, and says so."""

import shutil
from pathlib import Path

from server.database.database import DEFAULT_FILE
from tests.server.in_process import InProcess


def test_while_draining_nobody_is_admitted_and_told_to_try_elsewhere(
    migrated_sqlite: Path, tmp_path: Path
) -> None:
    shutil.copy(migrated_sqlite, tmp_path / DEFAULT_FILE)
    product = InProcess.build(tmp_path, f"sqlite:///{tmp_path / DEFAULT_FILE}")
    user = product.user("acme")
    product.gateway.drain.begin()
    refused = user.complete("base")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert product.engines.asked == []
    product.close()
