"""Who may come in, and what a caller's key lets it see: the gate that every connection and request passes.

It checks in this order: the page that asks is one of ours (``Origin``; without keys also ``Host``, against a foreign
name that was made to point here); whose key or ticket it is; how often that key has come.
:mod:`lakehouse.contract.access` describes the key file.

A browser that cannot send a header shows a ticket instead of its key, because addresses end up in logs. A ticket is
signed with the lake's key, so that any server process accepts it; it lives for :data:`LIVES_S` seconds, and each
process accepts it once.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import ssl
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qs, urlsplit

from lakehouse.contract.access import Key, KeyFile, KeyRing, StateManager, TokenBucket, is_loopback, state_manager
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline.tenants import UNDECLARED, TenantBorder
from lakehouse.contract.settings import ServeSettings, Settings
from lakehouse.contract.sql.filters import checked
from serve.core.model import OPEN, Principal
from serve.core.position import Seal, lake_seal
from serve.errors import FilterError, RequestError

log = logging.getLogger(__name__)

LIVES_S = 30
TICKET = "ticket"
"""Query parameter that stands for a key; any address may have it."""
_HEAD = struct.Struct(">Q12s")  # good until, seconds since the epoch; nonce
_SCHEME = "bearer "
_MAX_KEY_CHARS = 200
PUBLIC = frozenset({"/healthz", "/readyz", "/v1/openapi.json", "/v1/asyncapi.json"})
"""Routes without data; so are the dashboard's files, which lie beside ``/v1/``."""


def needs_key(path: str) -> bool:
    return path not in PUBLIC and (path == "/v1" or path.startswith("/v1/") or path == "/metrics")


class Closing(Protocol):
    """An open connection of a principal."""

    @property
    def principal(self) -> Principal: ...

    def close(self, code: int, reason: str) -> None:
        """End it, with a code of docs/reference/protocol.md."""


@dataclass(frozen=True, slots=True, repr=False)
class ReaderKey(Key):
    """A reader's key. ``rate`` is requests a second, ``connections`` are streams and polls.

    With ``queries`` it may add and remove continuous queries and alerts. Queries read whole tables and anybody's can be
    removed: so this excludes limits to tables, rows or a tenant.
    """

    tables: tuple[str, ...] = ()  # that it may read; empty: all
    rows: dict[str, str] = field(default_factory=dict)  # SQL conditions by table (`*`: every other one)
    queries: bool = False

    def __post_init__(self) -> None:
        Key.__post_init__(self)
        if self.queries and (self.tables or self.rows or self.tenant):
            raise ConfigError(
                "a key that is limited to tables, rows or a tenant may not change queries, which read whole tables",
                key="queries",
                remedy="Make two keys: one with --may queries alone, one with --table, --rows or --tenant",
            )
        for table, condition in self.rows.items():
            try:
                checked(condition)
            except FilterError as error:
                raise ConfigError(str(error), key=f"rows.{table}", remedy="Write a condition as in where=") from None

    def principal(self, border: TenantBorder) -> Principal:
        tables = frozenset(self.tables) if self.tables else None
        name = self.name or self.id
        return Principal(name, self.tenant, tables, self.rows, key=self.id, queries=self.queries, border=border)


def reader_keys(settings: Settings) -> KeyFile[ReaderKey]:
    named = settings.serve.keys
    return KeyFile(Path(named) if named else Lake.of(settings).state / "readers.toml", ReaderKey)


def checked_rows(texts: Sequence[str]) -> dict[str, str]:
    """Conditions by table, from ``TABLE=CONDITION``. Raises ConfigError."""
    found: dict[str, str] = {}
    for text in texts:
        table, equals, condition = text.partition("=")
        if not equals or not table.strip() or not condition.strip() or table.strip() in found:
            raise ConfigError(f"{text!r} is no condition", key="--rows", remedy="Write TABLE=CONDITION, once a table")
        found[table.strip()] = condition.strip()
    return found


class Tickets:
    """Makes and accepts tickets. ``seal`` signs nothing else; ``clock`` gives seconds since the epoch."""

    def __init__(self, seal: Seal, clock: Callable[[], float] = time.time) -> None:
        self._seal = seal
        self._clock = clock
        self._taken: dict[bytes, float] = {}  # nonce → end of life, in order of use

    def new(self, key_id: str) -> str:
        return self._seal.sealed(_HEAD.pack(int(self._clock()) + LIVES_S, secrets.token_bytes(12)) + key_id.encode())

    def take(self, text: str) -> str | None:
        """Id of the key that it was made for; None if it is forged, expired or already used."""
        try:
            body = self._seal.opened(text)
            until, nonce = _HEAD.unpack_from(body)
        except (ValueError, struct.error):
            return None
        now = self._clock()
        for old in [each for each, end in self._taken.items() if end < now]:
            del self._taken[old]
        if until < now or nonce in self._taken:
            return None
        self._taken[nonce] = until
        return body[_HEAD.size :].decode()


class ReaderGate:
    """Keys, tickets, origins and limits of one process. If there are keys, every caller must show one."""

    def __init__(
        self,
        settings: ServeSettings,
        keys: KeyRing[ReaderKey],
        tickets: Tickets,
        border: TenantBorder = UNDECLARED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._origins = frozenset(settings.origin_list)
        self._any_host = settings.allow_anonymous or not is_loopback(settings.host)
        self._keys = keys
        self._tickets = tickets
        self._border = border
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}
        self._principals: dict[str, tuple[ReaderKey, Principal]] = {}
        self._held: dict[str, set[Closing]] = {}
        self.refused: dict[str, int] = dict.fromkeys(("unauthorized", "forbidden", "too_fast", "full"), 0)

    @property
    def required(self) -> bool:
        """Whether callers must show a key."""
        return self._keys.required

    def admit(self, headers: Mapping[str, str], query: str) -> Principal:
        """The caller's principal; names of headers are in lower case. Raises RequestError: 4403 a foreign page, 4401 no
        good key or ticket, 4429 too often.
        """
        self._check_page(headers)
        if not self._keys.required:
            return OPEN
        key = self._shown(headers, query)
        if key is None:
            detail = "show a key: Authorization: Bearer KEY, or a fresh ticket"
            raise self._refusal(RequestError.UNAUTHORIZED, "unauthorized", detail)
        self._spend(key)
        return self._principal(key)

    def principal_of(self, key_id: str) -> Principal | None:
        """The current principal of a key that left something here, such as a webhook; None if the key is gone."""
        if not key_id:
            return None if self._keys.required else OPEN
        key = self._keys.get(key_id)
        return None if key is None else self._principal(key)

    def enter(self, principal: Principal, holder: Closing) -> None:
        """A stream or a poll begins; call :meth:`leave` at its end. Raises RequestError (1013) at the key's limit."""
        held = self._held.setdefault(principal.key, set())
        key = self._keys.get(principal.key) if principal.key else None
        if key is not None and key.connections and len(held) >= key.connections:
            detail = f"this key has {key.connections} connections open, which is its limit"
            raise self._refusal(RequestError.FULL, "full", detail)
        held.add(holder)

    def leave(self, principal: Principal, holder: Closing) -> None:
        held = self._held.get(principal.key, set())
        held.discard(holder)
        if not held:
            self._held.pop(principal.key, None)

    def sweep(self) -> None:
        """Close what was admitted with a key that is gone or has other rights now. Call it every second."""
        for key_id, held in list(self._held.items()):
            now = self.principal_of(key_id)
            for holder in list(held):
                if now is None or holder.principal != now:
                    log.info("key %s was revoked or changed: its connections are closed", key_id or "(none)")
                    holder.close(RequestError.UNAUTHORIZED, "the key was revoked, or may see something else now")
                    held.discard(holder)

    def ticket(self, principal: Principal) -> str:
        return self._tickets.new(principal.key)

    def _check_page(self, headers: Mapping[str, str]) -> None:
        origin, host = headers.get("origin"), headers.get("host", "")
        if origin is not None and origin not in self._origins and urlsplit(origin).netloc != host:
            raise self._refusal(RequestError.FORBIDDEN, "forbidden", "a page of another site may not do this")
        if not self._keys.required and not self._any_host and not self._is_local(host):
            detail = f"{host!r} is no name of this machine; add it to serve.origins"
            raise self._refusal(RequestError.FORBIDDEN, "forbidden", detail)

    def _is_local(self, host: str) -> bool:
        """Whether no foreign DNS answers for the name, or the operator has allowed it."""
        return is_local_name(host) or any(urlsplit(origin).netloc == host for origin in self._origins)

    def _shown(self, headers: Mapping[str, str], query: str) -> ReaderKey | None:
        text = headers.get("authorization", "")
        if text[: len(_SCHEME)].lower() == _SCHEME:
            return self._keys.find(text[len(_SCHEME) :].strip()[:_MAX_KEY_CHARS])
        if (key := headers.get("x-api-key")) is not None:
            return self._keys.find(key.strip()[:_MAX_KEY_CHARS])
        try:
            given = parse_qs(query, max_num_fields=64).get(TICKET, [])
        except ValueError:
            return None
        key_id = self._tickets.take(given[0]) if len(given) == 1 else None
        return self._keys.get(key_id) if key_id else None

    def _principal(self, key: ReaderKey) -> Principal:
        known = self._principals.get(key.id)
        if known is None or known[0] is not key:  # the file was read again
            known = self._principals[key.id] = key, key.principal(self._border)
        return known[1]

    def _spend(self, key: ReaderKey) -> None:
        if not key.rate:
            return
        now = self._clock()
        bucket = self._buckets.get(key.id)
        if bucket is None or bucket.rate != key.rate:
            bucket = self._buckets[key.id] = TokenBucket(key.rate, now)
        if bucket.take(1, now):
            raise self._refusal(RequestError.TOO_FAST, "too_fast", f"this key makes {key.rate} requests a second")

    def _refusal(self, close: int, code: str, detail: str) -> RequestError:
        self.refused[code] += 1
        return RequestError(close, code, detail)


@lru_cache(256)
def is_local_name(host: str) -> bool:
    """Whether a ``Host`` header is a number, or a name that no foreign DNS answers for."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if not host or name == "localhost" or name.endswith(".localhost"):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def make_gate(
    settings: Settings, seal: Seal, border: TenantBorder = UNDECLARED, manager: StateManager | None = None
) -> ReaderGate:
    """The gate of a process; with a state manager the control plane says who may read, without one a key file. Raises
    ConfigError: everybody could read everything, or keys or origins are unusable.
    """
    serve = settings.serve
    keys = KeyRing(reader_keys(settings) if manager is None else manager.keys(ReaderKey, "read"))
    for origin in serve.origin_list:
        parts = urlsplit(origin)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path or parts.query:
            remedy = "Write https://HOST[:PORT], without a path"
            raise ConfigError(f"{origin!r} is no origin", key="serve.origins", remedy=remedy)
    if not (is_loopback(serve.host) or keys.required or serve.allow_anonymous):
        raise ConfigError(
            f"{serve.host} is reached from elsewhere, and there are no readers' keys",
            key="serve.host",
            remedy="Make one with `millrace key new --may read NAME`, or set serve.allow_anonymous = true",
        )
    return ReaderGate(serve, keys, Tickets(Seal(seal.derived(b"tickets"))), border)


def check_start(settings: Settings) -> None:
    """Raises ConfigError for whatever would keep a server from starting. For whoever starts several."""
    make_gate(settings, lake_seal(Lake.of(settings).shared), manager=state_manager(settings))
    uses_tls(settings.serve)


def uses_tls(settings: ServeSettings) -> bool:
    """Whether the port speaks TLS. The files are tried: raises ConfigError if they cannot be used."""
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
