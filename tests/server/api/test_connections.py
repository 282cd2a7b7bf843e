"""Places of connections: by address, by tenant, and by whose last request is longest ago."""

from ipaddress import ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.errors import Fault
from server.api.connections import Connections


class FakeConnection:
    """A connection, and whether it had to give way."""

    def __init__(self) -> None:
        self.has_given_way = False

    def give_way(self) -> None:
        self.has_given_way = True


def opened(connections: Connections, host: str | None = None) -> FakeConnection:
    connection = FakeConnection()
    connections.open(connection, host)
    return connection


def refused(connections: Connections, host: str | None = None) -> bool:
    try:
        opened(connections, host)
    except Fault:
        return True
    return False


def test_a_newcomer_takes_the_place_of_the_one_whose_request_is_longest_ago() -> None:
    connections = Connections(3, 9)
    first, second, third = (opened(connections) for _ in range(3))
    connections.begin_request(first)
    fourth = opened(connections)
    connections.close(fourth)
    fifth = opened(connections)
    each = (first, second, third, fourth, fifth)
    assert [one.has_given_way for one in each] == [False, True, False, False, False]


def test_a_request_without_a_key_gives_way_and_a_key_does_not() -> None:
    connections = Connections(3, 9)
    keyed, *asking = (opened(connections) for _ in range(3))
    for connection in (keyed, *asking):
        connections.begin_request(connection)
    connections.show_key(keyed, "a")
    newcomers = [opened(connections) for _ in range(4)]
    assert [one.has_given_way for one in asking + newcomers] == [True] * 4 + [False] * 2
    assert not keyed.has_given_way
    connections.show_key(newcomers[2], "b")
    connections.show_key(newcomers[3], "c")
    assert refused(connections)
    connections.close(keyed)
    assert not refused(connections)


def test_an_address_has_its_share_and_a_trusted_proxy_all() -> None:
    trusted = [ip_network("10.0.0.0/8"), ip_network("::1")]
    connections = Connections(100, 2, trusted)
    for host in ("192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8:0:1::"):
        one, _ = opened(connections, host), opened(connections, host)
        assert refused(connections, host)
        connections.close(one)
        opened(connections, host)
    # One client has all addresses of a /64, and IPv4 may come in IPv6's form.
    for host in ("2001:db8::ffff:1", "::ffff:192.0.2.1"):
        assert refused(connections, host)
    for host in ("10.1.2.3", "::ffff:10.1.2.3", "::1", None):
        assert not any(refused(connections, host) for _ in range(5))


def test_a_connection_counts_for_the_tenant_whose_key_it_showed_last() -> None:
    connections = Connections(4, 9)
    shared = opened(connections)
    for tenant_id in ("a", "b", "a", "a"):
        connections.show_key(shared, tenant_id)
    connections.show_key(opened(connections), "a")
    with pytest.raises(Fault):
        connections.show_key(opened(connections), "a")
    connections.show_key(opened(connections), "b")


@given(
    st.integers(1, 12),
    st.lists(
        st.tuples(
            st.sampled_from(["open", "close", "begin", "key"]),
            st.integers(0, 11),
            st.sampled_from("abc"),
        ),
        max_size=120,
    ),
)
def test_no_tenant_has_more_than_it_leaves_and_no_place_is_lost(
    limit: int, steps: list[tuple[str, int, str]]
) -> None:
    """Steps: (what happens, to which connection, address or tenant)."""
    connections, alive = Connections(limit, limit + 1), list[FakeConnection]()
    tenants: dict[FakeConnection, str] = {}
    for what, number, name in steps:
        if what == "open":
            is_refused = len(tenants) == limit
            newcomer = FakeConnection()
            try:
                connections.open(newcomer, f"192.0.2.{ord(name)}")
            except Fault:
                assert is_refused
                continue
            assert not is_refused
            gone = [one for one in alive if one.has_given_way]
            assert len(gone) == (len(alive) == limit)
            assert not any(one in tenants for one in gone)
            alive = [one for one in alive if not one.has_given_way] + [newcomer]
        elif alive:
            one = alive[number % len(alive)]
            match what:
                case "close":
                    connections.close(one)
                    alive.remove(one)
                    tenants.pop(one, None)
                case "begin":
                    connections.begin_request(one)
                case "key":
                    has_key = {other: of for other, of in tenants.items() if other is not one}
                    mine = sum(of == name for of in has_key.values())
                    if tenants.get(one) == name or mine < limit - len(has_key):
                        connections.show_key(one, name)
                        tenants[one] = name
                    else:
                        with pytest.raises(Fault):
                            connections.show_key(one, name)
        assert len(alive) <= limit
    for one in alive:
        connections.close(one)
    # All places are free again, for one address.
    assert not any(refused(connections, "192.0.2.1") for _ in range(limit))
