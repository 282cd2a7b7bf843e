"""Compiled grammars, kept so that a demand is compiled once; a tenant finds only its own."""

from dataclasses import dataclass
from typing import Protocol

MAX_GRAMMARS = 512
"""About 130 MiB if all are as long as they may be."""
TENANT_GRAMMARS = 32


@dataclass(frozen=True, slots=True)
class Grammar:
    """A demand in the engine's form.   not_enforced: paths of parts that the form leaves out."""

    text: str
    not_enforced: tuple[str, ...] = ()


class Demand(Protocol):
    """A demand that answers must meet, such as a shape."""

    @property
    def digest(self) -> bytes: ...


class CompiledGrammars:
    """Grammars by tenant and demand, last used last. All methods belong to the event loop."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[bytes, Grammar]] = {}

    def get(self, tenant_id: str, demand: Demand) -> Grammar | None:
        kept = self._kept.get(tenant_id, {})
        if (grammar := kept.pop(demand.digest, None)) is not None:
            kept[demand.digest] = grammar
        return grammar

    def keep(self, tenant_id: str, demand: Demand, grammar: Grammar) -> None:
        """Keep a grammar. The tenant that has most gives one up if there are too many."""
        kept = self._kept.setdefault(tenant_id, {})
        kept[demand.digest] = grammar
        if len(kept) > TENANT_GRAMMARS:
            del kept[next(iter(kept))]
        if sum(map(len, self._kept.values())) > MAX_GRAMMARS:
            most = max(self._kept, key=lambda name: len(self._kept[name]))
            del self._kept[most][next(iter(self._kept[most]))]
            self._kept = {name: grammars for name, grammars in self._kept.items() if grammars}
