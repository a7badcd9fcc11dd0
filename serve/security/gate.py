"""The gate: every connection and request passes it before it gets anything, whatever the transport.

Its questions, in this order: is the page that asks one of ours (``Origin``, and without keys ``Host``, which stops a
foreign name that was made to point here); whose key or ticket is it; does that key come too often.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from urllib.parse import parse_qs, urlsplit

from lakehouse.contract.keys import KeyRing
from lakehouse.contract.rates import TokenBucket
from lakehouse.contract.settings import ServeSettings
from serve.errors import RequestError
from serve.principal import OPEN, Closing, Credentials, Principal
from serve.push.request import TICKET
from serve.security.readers import ReaderKey
from serve.security.tickets import Tickets

log = logging.getLogger(__name__)

SCHEME = "bearer "
_MAX_KEY_CHARS = 200


class Gate:
    """Keys, tickets, origins and limits of one process.

    Args:
        settings: address and origins.
        keys: the readers' keys; where there are any, one is asked of everybody.
        tickets: makes and takes tickets.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        settings: ServeSettings,
        keys: KeyRing[ReaderKey],
        tickets: Tickets,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._origins = frozenset(settings.origin_list)
        self._any_host = settings.allow_anonymous or not is_loopback(settings.host)
        self._keys = keys
        self._tickets = tickets
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}
        self._principals: dict[str, tuple[ReaderKey, Principal]] = {}
        self._held: dict[str, set[Closing]] = {}
        self.refused: dict[str, int] = dict.fromkeys(("unauthorised", "forbidden", "too_fast", "full"), 0)

    @property
    def required(self) -> bool:
        """Whether a key is asked for."""
        return self._keys.required

    def admit(self, credentials: Credentials) -> Principal:
        """Who comes in.

        Raises:
            RequestError: 4403 a page that may not, 4401 no good key or ticket, 4429 too often.
        """
        self._check_page(credentials.headers)
        if not self._keys.required:
            return OPEN
        key = self._shown(credentials)
        if key is None:
            raise self._refusal(
                RequestError.UNAUTHORISED, "unauthorised", "show a key: Authorization: Bearer KEY, or a fresh ticket"
            )
        self._spend(key)
        return self._principal(key)

    def principal_of(self, key_id: str) -> Principal | None:
        """The principal of what was left here for a key, such as a webhook; None: the key is gone."""
        if not key_id:
            return None if self._keys.required else OPEN
        key = self._keys.get(key_id)
        return None if key is None else self._principal(key)

    def enter(self, principal: Principal, holder: Closing) -> None:
        """A stream or a poll begins; call :meth:`leave` at its end.

        Raises:
            RequestError: 1013, this key has as many as it may.
        """
        held = self._held.setdefault(principal.key, set())
        key = self._keys.get(principal.key) if principal.key else None
        if key is not None and key.connections and len(held) >= key.connections:
            detail = f"no more than {key.connections} connections at a time for this key"
            raise self._refusal(RequestError.FULL, "full", detail)
        held.add(holder)

    def leave(self, principal: Principal, holder: Closing) -> None:
        """It has ended, or never began."""
        held = self._held.get(principal.key)
        if held is not None:
            held.discard(holder)
            if not held:
                del self._held[principal.key]

    def sweep(self) -> None:
        """Close what was let in with a key that is gone, or has other rights by now. Call it about once a second."""
        for key_id, held in list(self._held.items()):
            now = self.principal_of(key_id)
            for holder in list(held):
                if now is None or holder.principal != now:
                    log.info("key %s was revoked or changed: its connections are closed", key_id or "(none)")
                    holder.close(RequestError.UNAUTHORISED, "the key was revoked, or may see something else now")
                    held.discard(holder)

    def ticket(self, principal: Principal) -> str:
        """A ticket with this principal's rights."""
        return self._tickets.new(principal.key)

    def allowed_origin(self, headers: Mapping[str, str]) -> str | None:
        """The foreign page's origin, where it is one that may come: what CORS headers have to name."""
        origin = headers.get("origin", "")
        return origin if origin in self._origins else None

    def _check_page(self, headers: Mapping[str, str]) -> None:
        origin, host = headers.get("origin"), headers.get("host", "")
        if origin is not None and origin not in self._origins and urlsplit(origin).netloc != host:
            raise self._refusal(RequestError.FORBIDDEN, "forbidden", "a page of another site may not do this")
        if not self._keys.required and not self._any_host and not self._is_local(host):
            raise self._refusal(
                RequestError.FORBIDDEN, "forbidden", f"{host!r} is no name of this machine; add it to serve.origins"
            )

    def _is_local(self, host: str) -> bool:
        """Names that no foreign DNS answers for; or that the operator has named."""
        return is_local_name(host) or any(urlsplit(origin).netloc == host for origin in self._origins)

    def _shown(self, credentials: Credentials) -> ReaderKey | None:
        text = credentials.headers.get("authorization", "")
        if text[: len(SCHEME)].lower() == SCHEME:
            return self._keys.find(text[len(SCHEME) :].strip()[:_MAX_KEY_CHARS])
        try:
            given = parse_qs(credentials.query, max_num_fields=64).get(TICKET, [])
        except ValueError:
            return None
        key_id = self._tickets.take(given[0]) if len(given) == 1 else None
        return self._keys.get(key_id) if key_id else None

    def _principal(self, key: ReaderKey) -> Principal:
        known = self._principals.get(key.id)
        if known is None or known[0] is not key:  # a new reading of the file makes new keys
            known = self._principals[key.id] = key, key.principal()
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
    """Whether a ``Host`` header is a number or a name that no foreign DNS answers for."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if not host or name == "localhost" or name.endswith(".localhost"):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
