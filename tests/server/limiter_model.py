"""A model of limiters that derives each answer from the whole history of a limit."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Log:
    """History of a limit. at: time of the last change.   amounts: (since, value).

    charges: [at, units, expires, request_id], corrected when they are released.
    open: ids of requests that are not released.
    """

    at: int
    amounts: list[tuple[int, int]]
    charges: list[list[Any]] = field(default_factory=list)
    open: set[str] = field(default_factory=set)

    def backlog(self, now: int) -> int:
        at, amount = self.amounts[0]
        level = amount * 60_000
        changes = [(since, value, 0) for since, value in self.amounts]
        changes += [(charge[0], None, charge[1]) for charge in self.charges]
        changes.append((max(now, self.at), None, 0))
        for moment, value, units in sorted(changes, key=lambda change: change[0]):
            level, at = max(0, level - amount * (moment - at)), moment
            level += units * 60_000
            amount = amount if value is None else value
        return level

    def holders(self, now: int) -> list[tuple[str, int, int]]:
        charges = [charge for charge in self.charges if charge[3] in self.open]
        now = max(now, self.at)
        return [(name, units, end - now) for _, units, end, name in charges if end > now]

    def wait(self, is_seats: bool, amount: int, units: int, now: int) -> int:
        if amount == 0:
            return 60_000
        now = max(now, self.at)
        if is_seats:
            waits = [0, *sorted(end for _, _, end in self.holders(now))]
            return next(wait for wait in waits if len(self.holders(now + wait)) < amount)
        view = Log(self.at, [*self.amounts, (now, amount)], self.charges)
        room, enough = (amount - min(units, amount)) * 60_000, view.backlog(now) // amount + 2
        return bisect_left(range(enough), True, key=lambda w: view.backlog(now + w) <= room)

    def charge(self, name: str, units: int, lifetime: int) -> None:
        self.charges.append([self.at, min(units, self.amounts[-1][1]), self.at + lifetime, name])
        self.open.add(name)

    def release(self, name: str, used: int, now: int) -> None:
        self.at = max(now, self.at)
        for charge in self.charges:
            if charge[3] == name and name in self.open and charge[2] > self.at:
                self.charges.append([self.at, max(0, used - charge[1]), 0, ""])
                charge[1] = min(used, charge[1])
        self.open.discard(name)
