"""The engines that there are, as their placer last said."""

import logging
from pathlib import Path

from server.pool.files import Member, PoolFileDamaged, changed_at, members_path, read_members

logger = logging.getLogger(__name__)


class Membership:
    """Reads the placer's file when it has changed; a damaged file changes nothing."""

    def __init__(self, data_dir: Path) -> None:
        self._path = members_path(data_dir)
        self._read_at = 0
        self._members: tuple[Member, ...] = ()

    def __call__(self) -> tuple[Member, ...]:
        if (at := changed_at(self._path)) != self._read_at:
            self._read_at = at
            try:
                self._members = read_members(self._path)
            except (PoolFileDamaged, OSError) as error:
                logger.error("%s", error)
        return self._members
