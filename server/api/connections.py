"""Connections of one gateway process: how many may be open, and which one ends for a newcomer.

Each call takes the same time, however many are open.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from server.api import errors
from server.api.addresses import Network, is_in, parse_address

# A client of IPv6 has all addresses that begin with the same 8 bytes; an address of IPv4 has 4.
_COUNTED_BYTES = 8


class Connection(Protocol):
    def give_way(self) -> None:
        """Close at once."""


@dataclass(slots=True, eq=False)
class Connections:
    """Connections by address and by tenant. Only one on which no key was ever shown may have to
    give way, also in the middle of a request: whoever sends a body, or waits for an answer, before
    it is known who asks holds no place that a client with a key needs.

    A tenant may show its keys on as many connections as are left when all on which a key was shown
    are counted. So one tenant takes half of them at most, two take a third each, and some are
    always left for others.
    """

    limit: int
    limit_per_address: int
    trusted_proxies: Sequence[Network] = ()
    # The addresses of all open connections; None where they do not count.
    _addresses: dict[Connection, bytes | None] = field(default_factory=dict, init=False)
    _num_at: Counter[bytes | None] = field(default_factory=Counter, init=False)
    _tenants: dict[Connection, str] = field(default_factory=dict, init=False)
    _num_of: Counter[str] = field(default_factory=Counter, init=False)
    # Connections that may have to give way; the one whose last request is longest ago is first.
    _keyless: OrderedDict[Connection, None] = field(default_factory=OrderedDict, init=False)

    def open(self, connection: Connection, host: str | None) -> None:
        """Count a connection. Raises Invalid if there is no place."""
        address = self._address(host)
        if address is not None and self._num_at[address] >= self.limit_per_address:
            raise errors.too_many_connections("Your address has as many as it may.")
        if len(self._addresses) >= self.limit:
            if not self._keyless:
                raise errors.too_many_connections()
            first = next(iter(self._keyless))
            self.close(first)
            first.give_way()
        self._addresses[connection] = address
        self._num_at[address] += 1
        self._keyless[connection] = None

    def close(self, connection: Connection) -> None:
        """Count a connection no more; nothing happens if it is not counted."""
        if connection in self._addresses:
            self._keyless.pop(connection, None)
            _decrease(self._num_at, self._addresses.pop(connection))
            self._forget_key(connection)

    def begin_request(self, connection: Connection) -> None:
        if connection in self._keyless:
            self._keyless.move_to_end(connection)

    def show_key(self, connection: Connection, tenant_id: str) -> None:
        """Count a connection as the tenant's. Raises Invalid if the tenant has its share."""
        known_as = self._tenants.get(connection)
        if connection not in self._addresses or known_as == tenant_id:
            return
        num_left = self.limit - len(self._tenants) + (known_as is not None)
        if self._num_of[tenant_id] >= num_left:
            raise errors.too_many_connections("Your keys are in use on as many as they may be.")
        self._forget_key(connection)
        self._keyless.pop(connection, None)
        self._tenants[connection] = tenant_id
        self._num_of[tenant_id] += 1

    def _forget_key(self, connection: Connection) -> None:
        tenant_id = self._tenants.pop(connection, None)
        if tenant_id is not None:
            _decrease(self._num_of, tenant_id)

    def _address(self, host: str | None) -> bytes | None:
        """A client's address as it is counted; None for a proxy, and for a Unix socket."""
        if host is None or is_in(host, self.trusted_proxies):
            return None
        return parse_address(host).packed[:_COUNTED_BYTES]


def _decrease(counts: Counter[Any], key: object) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
