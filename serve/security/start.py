"""What is checked before a server listens, and its TLS."""

from __future__ import annotations

import ssl
from pathlib import Path
from urllib.parse import urlsplit

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.keys import KeyRing
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import ServeSettings, Settings
from serve.position import Seal, lake_seal
from serve.security.gate import Gate, is_loopback
from serve.security.readers import reader_keys
from serve.security.tickets import Tickets
from serve.webhooks.sealed import sealer_of


def make_gate(settings: Settings, seal: Seal) -> Gate:
    """The gate of a server process.

    Raises:
        ConfigError: everybody could read everything, or the keys or origins cannot be used.
    """
    serve = settings.serve
    keys = KeyRing(reader_keys(settings))
    for origin in serve.origin_list:
        parts = urlsplit(origin)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path or parts.query:
            remedy = "Write https://HOST[:PORT], without a path"
            raise ConfigError(f"{origin!r} is no origin", key="serve.origins", remedy=remedy)
    if not (is_loopback(serve.host) or keys.required or serve.allow_anonymous):
        raise ConfigError(
            f"{serve.host} is reached from elsewhere, and there are no readers' keys",
            key="serve.host",
            remedy="Make one with `millrace keys new --reader NAME`, or set serve.allow_anonymous = true",
        )
    return Gate(serve, keys, Tickets(seal.derived(b"tickets")))


def check_start(settings: Settings) -> None:
    """What a server would not start with, said by whoever starts several.

    Raises:
        ConfigError: see :func:`make_gate`, :func:`uses_tls` and :func:`serve.webhooks.sealed.sealer_of`.
    """
    make_gate(settings, lake_seal(Lake(settings.lake).state))
    uses_tls(settings.serve)
    sealer_of(settings.serve.webhook_key)


def uses_tls(settings: ServeSettings) -> bool:
    """Whether the port speaks TLS; the files are tried, so that a wrong one stops the start and is named.

    Raises:
        ConfigError: certificate or key cannot be used.
    """
    if bool(settings.tls_cert) != bool(settings.tls_key):
        missing = "serve.tls_key" if settings.tls_cert else "serve.tls_cert"
        raise ConfigError("a certificate and its key come together", key=missing, remedy="Give both, or neither")
    if not settings.tls_cert:
        return False
    for key, path in (("serve.tls_cert", settings.tls_cert), ("serve.tls_key", settings.tls_key)):
        if not Path(path).is_file():
            raise ConfigError(f"there is no file {path!r}", key=key, remedy="Name a PEM file")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    except (ssl.SSLError, OSError) as error:
        remedy = "Name two PEM files that belong together"
        raise ConfigError(f"no certificate and its key: {error}", key="serve.tls_cert", remedy=remedy) from None
    return True
