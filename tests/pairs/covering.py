"""A choice of cases in which every combination of a few values occurs, by greedy choice."""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations

Case = Mapping[str, str]
"""A value for every axis."""
Combination = frozenset[tuple[str, str]]


def combinations_of(case: Case, strength: int) -> set[Combination]:
    """Every combination of so many axes with the case's values."""
    return {frozenset(part) for part in combinations(sorted(case.items()), strength)}


def cover(
    cases: Iterable[Case],
    strength: int = 2,
    cost: Callable[[Case, Sequence[Case]], float] = lambda case, chosen: 0.0,
) -> list[Case]:
    """Choose cases until every combination that occurs in any of them occurs in a chosen one.

    cost: of a case beside those that are chosen; it decides between cases that cover as much.
    """
    candidates = list(cases)
    parts = [combinations_of(case, strength) for case in candidates]
    left = set().union(*parts)
    chosen: list[Case] = []
    # What a case covers only shrinks: the first whose figure is up to date covers most.
    heap = [(-len(part), 0.0, number) for number, part in enumerate(parts)]
    heapq.heapify(heap)
    while left:
        gain, paid, number = heapq.heappop(heap)
        now = (-len(parts[number] & left), cost(candidates[number], chosen), number)
        if now[0] == 0:
            continue
        if now > (gain, paid, number):
            heapq.heappush(heap, now)
            continue
        chosen.append(candidates[number])
        left -= parts[number]
    return chosen
