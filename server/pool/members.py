"""The members of a pool: followed as they come and go, and connected as long as they are there."""

from collections.abc import Callable, Iterable, Iterator

from server.pool.control_files import Member
from server.pool.engine import PooledEngine


class Members:
    """The engines that `read` names, each with a client.

    connect: makes the engine of a member.
    """

    def __init__(
        self, read: Callable[[], Iterable[Member]], connect: Callable[[Member], PooledEngine]
    ) -> None:
        self._read = read
        self._connect = connect
        self._engines: dict[str, PooledEngine] = {}
        self._num_past_deaths = 0

    def __iter__(self) -> Iterator[PooledEngine]:
        return iter(list(self._engines.values()))

    def find(self, name: str) -> PooledEngine | None:
        return self._engines.get(name)

    @property
    def ready(self) -> list[PooledEngine]:
        """The engines that take requests."""
        return [engine for engine in self._engines.values() if engine.state == "ready"]

    @property
    def num_deaths(self) -> int:
        """How often one has died, former members included."""
        deaths = (engine.client.num_deaths for engine in self._engines.values())
        return self._num_past_deaths + sum(deaths)

    async def follow(self) -> list[str]:
        """Connect to new members and disconnect from former ones; a moved engine counts as both.

        Returns the names of those that it has disconnected from.
        """
        members = {member.name: member for member in self._read()}
        gone = [it.name for it in self._engines.values() if members.get(it.name) != it.member]
        await self._part(gone)
        for name in members.keys() - self._engines.keys():
            engine = self._engines[name] = self._connect(members[name])
            await engine.client.start()
        return gone

    async def close(self) -> None:
        """Disconnect from all."""
        await self._part(list(self._engines))

    async def _part(self, names: Iterable[str]) -> None:
        for name in names:
            client = self._engines.pop(name).client
            await client.close()
            self._num_past_deaths += client.num_deaths
