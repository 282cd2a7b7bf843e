"""Addresses of clients, and the networks that they belong to."""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Network = IPv4Network | IPv6Network


def parse_address(host: str) -> IPv4Address | IPv6Address:
    """The address, in IPv4's own form if IPv6's only wraps it. Raises ValueError."""
    address = ip_address(host)
    return (isinstance(address, IPv6Address) and address.ipv4_mapped) or address


def is_in(host: str, networks: Iterable[Network]) -> bool:
    """Whether an address belongs to one of the networks; what is no address does not."""
    try:
        address = parse_address(host)
    except ValueError:
        return False
    return any(address in network for network in networks)
