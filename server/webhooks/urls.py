"""Which addresses a webhook may be sent to: public ones, looked up once and then connected to.

BadWebhookUrl   the URL cannot be sent to, or its host is not of the public internet
"""

import asyncio
import ipaddress
import re
import socket
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import httpx

MAX_URL_CHARACTERS = 2048
_PLAIN = re.compile(r"[!-~]+")
_UNICAST = IPv6Network("2000::/3")
"""All that the internet routes; what embeds an IPv4 address elsewhere is outside of it."""
_INSIDE = (
    IPv4Network("192.0.0.0/24"),  # global to Python 3.11; some clouds keep their metadata there
    IPv4Network("192.88.99.0/24"),
    IPv4Network("168.63.129.16/32"),  # the host of a virtual machine at Azure
)


class BadWebhookUrl(Exception):
    """Says which rule it breaks."""


@dataclass(frozen=True, slots=True)
class UrlRules:
    """For tests and for closed networks: what else is let through."""

    allow_http: bool = False
    allow_private: bool = False


def check_url(text: str, rules: UrlRules) -> httpx.URL:
    """What is wrong with it without asking for its host's address. Raises BadWebhookUrl."""
    if len(text) > MAX_URL_CHARACTERS or not _PLAIN.fullmatch(text):
        raise BadWebhookUrl(f"url is at most {MAX_URL_CHARACTERS} visible ASCII characters.")
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise BadWebhookUrl("url is not a URL.") from error
    if url.scheme not in (("https", "http") if rules.allow_http else ("https",)):
        raise BadWebhookUrl("url begins with https://.")
    if not url.host or url.userinfo or url.fragment:
        raise BadWebhookUrl("url names a host, and neither a user nor a fragment.")
    try:
        address = ipaddress.ip_address(url.host)
    except ValueError:
        return url  # a name
    _check_address(address, rules)
    return url


async def resolve(url: httpx.URL, rules: UrlRules) -> str:
    """The address to connect to. Raises BadWebhookUrl unless all of the host's are allowed."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(url.host, url.port or 443, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise BadWebhookUrl("The host has no address.") from error
    addresses = [ipaddress.ip_address(info[4][0]) for info in found]
    for address in addresses:
        _check_address(address, rules)
    return str(addresses[0])


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Of the public internet, also by what it carries inside."""
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
        # Not which one: it would tell what names mean inside.
        raise BadWebhookUrl("The host's address is not a public one.")
