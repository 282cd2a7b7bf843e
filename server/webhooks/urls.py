"""Checks webhook URLs: the host must have public addresses, and the checked address is used."""

import asyncio
import ipaddress
import re
import socket
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import TYPE_CHECKING

from registry.errors import Invalid

# Gateways without webhooks need no HTTP client, whose import takes 0.1 s.
if TYPE_CHECKING:
    import httpx

MAX_URL_CHARACTERS = 2048
_PLAIN = re.compile(r"[!-~]+")
_UNICAST = IPv6Network("2000::/3")
"""Global unicast addresses; addresses that embed IPv4 in other prefixes lie outside this range."""
_INSIDE = (
    IPv4Network("192.0.0.0/24"),  # Python 3.11 says global; some clouds serve metadata there
    IPv4Network("192.88.99.0/24"),
    IPv4Network("168.63.129.16/32"),  # the host of a virtual machine at Azure
)


@dataclass(frozen=True, slots=True)
class UrlRules:
    """Exceptions to the rules, for tests and for closed networks."""

    allow_http: bool = False
    allow_private: bool = False


def check_url(text: str, rules: UrlRules) -> "httpx.URL":
    """Parse and check a URL without looking up its host. Raises Invalid."""
    import httpx

    if len(text) > MAX_URL_CHARACTERS or not _PLAIN.fullmatch(text):
        raise Invalid(
            f"url must be at most {MAX_URL_CHARACTERS} visible ASCII characters.", param="url"
        )
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise Invalid("url is not a URL.", param="url") from error
    schemes = ("https", "http") if rules.allow_http else ("https",)
    if url.scheme not in schemes:
        shown = " or ".join(f"{scheme}://" for scheme in schemes)
        raise Invalid(f"url must begin with {shown}.", param="url")
    if not url.host or url.userinfo or url.fragment:
        raise Invalid("url must name a host, and neither a user nor a fragment.", param="url")
    try:
        address = ipaddress.ip_address(url.host)
    except ValueError:
        return url  # The host is a name; `resolve` checks its addresses.
    _check_address(address, rules)
    return url


async def resolve(url: "httpx.URL", rules: UrlRules) -> str:
    """Return the address to connect to. Raises Invalid unless all the host's are allowed."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(url.host, url.port or 443, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Invalid("The host has no address.", param="url") from error
    addresses = [ipaddress.ip_address(info[4][0]) for info in found]
    for address in addresses:
        _check_address(address, rules)
    return str(addresses[0])


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address belongs to the public internet.

    An IPv4-mapped address counts as its IPv4 address; 6to4 and Teredo addresses are refused.
    """
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address.sixtofour or address.teredo or address not in _UNICAST:
            return False
    elif address.is_multicast or any(address in network for network in _INSIDE):
        return False
    return address.is_global


def _check_address(address: IPv4Address | IPv6Address, rules: UrlRules) -> None:
    if not rules.allow_private and not is_public(address):
        # The message leaves the address out: it would reveal how internal names resolve.
        raise Invalid("The host's address is not a public one.", param="url")
