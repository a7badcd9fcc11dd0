"""Where a webhook may call. Whoever may add one could otherwise make the server talk to what only the server reaches.

The name is resolved once for each attempt, every address that it has is judged, and the connection goes to one that was
judged: a name that answers otherwise the second time gains nothing. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

import httpx

from serve.errors import ServeError

_MAX_URL = 2_048
_SHARED = ipaddress.ip_network("64:ff9b::/96")  # NAT64: IPv4 within, judged as such


class Forbidden(ServeError):
    """An address that is not called.

    Attributes:
        problem: why.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return self.problem


@dataclass(frozen=True, slots=True)
class Target:
    """Where one request goes.

    Attributes:
        url: with the address in the place of the name.
        host: header of that name.
        name: that the certificate is checked against.
    """

    url: str
    host: str
    name: str


def checked_url(text: str) -> SplitResult:
    """A URL's parts; the host as DNS and HTTP have it (IDNA), in small letters.

    Raises:
        Forbidden: it is none that webhooks take.
    """
    if len(text) > _MAX_URL or any(ord(char) <= 32 or ord(char) == 127 for char in text):
        raise Forbidden("the URL is too long, or has spaces or control characters in it")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise Forbidden(f"no URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Forbidden("the URL is http:// or https:// with a host")
    if parts.username is not None or parts.password is not None:
        raise Forbidden("the URL has a user or a password in it; requests are signed instead")
    if parts.fragment or port == 0:
        raise Forbidden("the URL has a fragment, or port 0")
    try:
        host = httpx.URL(scheme=parts.scheme, host=parts.hostname).raw_host.decode()
    except httpx.InvalidURL as error:
        raise Forbidden(str(error)) from None
    host = f"[{host}]" if ":" in host else host
    return parts._replace(netloc=host if port is None else f"{host}:{port}")


async def target_of(url: str, *, private: bool) -> Target:
    """Resolve a URL's host, now.

    Args:
        url: of the webhook.
        private: whether any address will do.

    Raises:
        Forbidden: an address of it is not reached from the public internet, or it has none.
    """
    parts = checked_url(url)
    assert parts.hostname is not None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Forbidden(f"{parts.hostname} has no address: {error}") from None
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        if not private and not is_public(address):
            raise Forbidden(f"{parts.hostname} is {address}, which is not on the public internet")
    if not addresses:
        raise Forbidden(f"{parts.hostname} has no address")
    address = addresses[0]
    netloc = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return Target(parts._replace(netloc=netloc).geturl(), parts.netloc, parts.hostname)


def is_public(text: str) -> bool:
    """Whether an address belongs to somebody on the internet: not loopback, private, link-local, shared or reserved."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is None and address in _SHARED:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return address.is_global and not address.is_multicast and not address.is_reserved
