"""The highest rate that several gateway processes behind one port hold, beside that of one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.billing.measurement import Measurement
from bench.databases import DATABASES
from bench.gateway import ours
from bench.gateway.load import find_held_rate
from bench.report import ratio
from tests.redis_server import RedisServer


@dataclass(frozen=True, kw_only=True)
class Processes(Measurement):
    """Rates of whole answers, with PostgreSQL and Redis on the same machine.

    gateways: numbers of gateway processes, the first of which the others are compared with.
    """

    gateways: tuple[int, ...] = (1, 2)
    max_tokens: int = 16
    first_rate: float = 40.0
    attempt_s: float = 4.0

    def measure(self, folder: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for number in self.gateways:
            place = folder / str(number)
            place.mkdir()
            result[str(number)] = self._held(place, number)
        first, *others = (result[str(number)]["held_per_s"] for number in self.gateways)
        return result | {"to_first": [ratio(other, first) for other in others]}

    def _held(self, folder: Path, number: int) -> dict[str, Any]:
        redis = RedisServer(folder).start()
        try:
            with (
                DATABASES["postgresql"](folder / "db") as url,
                ours.serving(folder, url, redis_url=redis.url, gateways=number) as gateway,
            ):
                target = gateway.target(self.max_tokens)
                return find_held_rate(target, self.first_rate, self.attempt_s)
        finally:
            redis.stop()
