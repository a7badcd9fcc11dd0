"""Who may send and who may read: API keys from a file or from the control plane, for collectors and servers alike.

A key is ``mr_ID_SECRET``, the secret being 256 random bits. Only SHA-256 of it is kept: nothing slower is needed for a
secret that cannot be guessed. A running process reads its file again when it has changed, so that a revoked key ends
within :data:`RELOAD_S`. A tier says what its keys may do by a dataclass of its own below :class:`Key`.
:class:`TokenBucket` says how fast somebody may go.

The control plane answers ``GET /v1/state`` with a JSON object of four maps: ``tenants`` by name, ``apps`` by
``TENANT/APP``, ``keys`` by id and ``sources`` by name. With ``If-None-Match`` it answers the entries that have changed
since; null says that one is gone. ``wait`` makes it hold the answer until there is a change. :class:`StateManager` asks
for it in a thread of its own.

Hot paths read the maps in memory and never wait. The last good state is in :attr:`Settings.control_state`, where a
process that starts while the control plane is down finds it. Processes of one machine may share the folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import ipaddress
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

import orjson

from lakehouse.contract.errors import ConfigError, MillraceError
from lakehouse.contract.settings import Settings
from lakehouse.contract.storage import Stamp, locked, stamp_of, write_whole
from lakehouse.contract.tomlfile import build, read_toml, toml_text

log = logging.getLogger(__name__)

RELOAD_S = 1.0
_NOBODY = hashlib.sha256(b"").hexdigest()
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # checked as the IPv4 address within

MAPS = ("tenants", "apps", "keys", "sources")
STATE_FILE = "state.json"
SOURCES_FOLDER = "sources"
MACHINE_KEY = "machine.key"
ADMIN_KEY = "admin.key"
_TIMEOUT_S = 3.0  # beyond the time that an answer is held
_BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, MillraceError)  # somebody else may answer


@dataclass(frozen=True, slots=True, repr=False)
class Key:
    """What is kept of any key.

    Attributes:
        hash: SHA-256 of the whole key, hexadecimal.
        name: whose it is, for people.
        tenant: that it belongs to; empty: the process's own.
        rate: events or requests a second, on each process; 0: no limit of its own.
        connections: at a time, on each process; 0: no limit of its own.
        created: when it was made, ISO 8601.
        id: the public part of the key.
        until: end of its life, seconds since the epoch; 0: none.
    """

    hash: str
    name: str = ""
    tenant: str = ""
    rate: int = 0
    connections: int = 0
    created: str = ""
    id: str = ""
    until: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        if min(self.rate, self.connections, self.until) < 0:
            raise ConfigError("a limit is not negative", key="keys", remedy="Write 0 for no limit")
        if len(self.hash) != 64:
            raise ConfigError("not a SHA-256 in hexadecimal", key="hash", remedy="Make keys with: millrace key new")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id}, {self.name!r})"


K = TypeVar("K", bound=Key)


class KeyFile(Generic[K]):
    """One file of keys, ``[keys.ID]`` tables in TOML.

    Args:
        path: of the file; made, readable by its owner only, when the first key is.

    Attributes:
        required: whether a key has to be shown although there is none.
        reload_s: pause between two looks at the stamp, which differs when the keys may have changed.
    """

    required = False
    reload_s = RELOAD_S

    def __init__(self, path: Path, kind: type[K]) -> None:
        self.path = path
        self._kind = kind

    def __str__(self) -> str:
        return str(self.path)

    def stamp(self) -> Stamp | None:
        return stamp_of(self.path)

    def read(self) -> dict[str, K]:
        """Keys by id; none where there is no file. Raises ConfigError."""
        if not self.path.exists():
            return {}
        tables = read_toml(self.path)
        if unknown := tables.keys() - {"keys"}:
            raise ConfigError("unknown key", key=min(unknown), remedy="Known keys: keys", file=self.path)
        found: Any = tables.get("keys", {})
        if not isinstance(found, Mapping) or not all(isinstance(value, Mapping) for value in found.values()):
            raise ConfigError("not a table of keys", key="keys", remedy="[keys.ID]", file=self.path)
        return {
            name: dataclasses.replace(build(self._kind, values, file=self.path, at=f"keys.{name}"), id=name)
            for name, values in found.items()
        }

    def new(self, key: K) -> str:
        """Add a key with these properties; returns the key itself, which is nowhere else.

        Args:
            key: its ``hash``, ``id`` and ``created`` do not matter.
        """
        name = new_key_id()
        text = new_key(name)
        made = dataclasses.replace(
            key, id=name, hash=key_hash(text), created=datetime.now(UTC).isoformat(timespec="seconds")
        )
        with self._changing() as keys:
            keys[name] = made
        return text

    def revoke(self, name: str) -> K:
        """Take a key away. Raises ConfigError."""
        with self._changing() as keys:
            if name not in keys:
                known = f"Known: {', '.join(keys) or 'none'}"
                raise ConfigError(f"there is no key {name!r}", key="keys", remedy=known, file=self.path)
            return keys.pop(name)

    @contextmanager
    def _changing(self) -> Iterator[dict[str, K]]:
        """The keys, to be changed; written when the block ends, one process at a time."""
        with locked(self.path.with_name(f"{self.path.name}.lock")):
            keys = self.read()
            yield keys
            tables = [toml_text(_said(key), f"keys.{name}") for name, key in keys.items()]
            text = "".join(["# API keys: hashes, made and revoked with `millrace key`.\n", *tables])
            write_whole(self.path, text.encode(), 0o600, durable=True)


class KeyRing(Generic[K]):
    """The keys as a running process uses them. Nothing here waits.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, source: KeyFile[K] | StateKeys[K], clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        self._stamp = source.stamp()
        self._keys = source.read()
        self._asked = source.required or bool(self._keys)
        self._look_at = clock() + source.reload_s

    @property
    def required(self) -> bool:
        """Whether a key has to be shown: there is one, or was when the process started."""
        self._reload()
        return self._asked

    def find(self, presented: str) -> K | None:
        """The key that was presented, or None."""
        self._reload()
        parts = presented.split("_", 2)
        key = self._keys.get(parts[1]) if len(parts) == 3 else None
        same = hmac.compare_digest(key_hash(presented), key.hash if key is not None else _NOBODY)
        return _living(key) if same else None

    def get(self, name: str) -> K | None:
        """The key of an id, where the id itself is proof enough: a ticket that we signed, something kept for a key."""
        self._reload()
        return _living(self._keys.get(name))

    def _reload(self) -> None:
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + self._source.reload_s
        try:
            stamp = self._source.stamp()
            if stamp == self._stamp:
                return
            self._keys = self._source.read()
        except ConfigError as error:
            self._stamp = stamp  # said once: it is read again when it has changed
            log.error("the keys stay as they were: %s", error)
            return
        except OSError as error:
            log.error("the keys stay as they were, until the file can be read: %s", error)
            return
        self._stamp = stamp
        self._asked = self._asked or bool(self._keys)  # the last key revoked does not open the door to everybody
        log.info("%s: %d keys", self._source, len(self._keys))


def _living(key: K | None) -> K | None:
    return None if key is not None and key.until and key.until <= time.time() else key


def new_key(name: str) -> str:
    """A new key with this id."""
    return f"mr_{name}_{secrets.token_urlsafe(32)}"


def new_key_id() -> str:
    return secrets.token_hex(6)


def key_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _said(key: Key) -> dict[str, Any]:
    values = dataclasses.asdict(key)
    return {name: value for name, value in values.items() if name != "id" and value not in ("", 0, (), {}, False)}


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address, or ``localhost``."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def is_public(text: str) -> bool:
    """Whether an address is on the public internet: not loopback, private, link-local, shared or reserved."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return address.is_global and not address.is_multicast and not address.is_reserved


class TokenBucket:
    """Lets ``rate`` things a second through, and as many at once as come in a second.

    A batch that is larger passes when the bucket is not empty, and leaves a debt: so that a rate below the size of a
    batch does not refuse it for ever.

    Args:
        now: seconds, monotonic.
    """

    __slots__ = ("_left", "_then", "rate")

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._left = float(rate)
        self._then = now

    def take(self, count: int, now: float) -> float:
        """Take so many; 0, or the seconds after which it is worth another try (then none were taken)."""
        wait = self.wait(now)
        if not wait:
            self._left -= count
        return wait

    def wait(self, now: float) -> float:
        """0 where something may be taken, else the seconds after which it is worth another try."""
        self._left = min(self.rate, self._left + (now - self._then) * self.rate)
        self._then = now
        return max(0.001, -self._left / self.rate) if self._left <= 0 else 0.0


def control_folder(settings: Settings) -> Path:
    """Folder of the lake's own control plane: its database, and the keys that it makes at its first start."""
    return settings.work_folder() / "control"


def address_file(settings: Settings) -> Path:
    """Where a control plane that runs with this lake says its address, for commands."""
    return control_folder(settings) / "address"


def key_text(settings: Settings, default: str) -> str:
    """The key that this process shows to the control plane. Raises ConfigError.

    Args:
        default: name of the file where ``control.key`` is empty: :data:`MACHINE_KEY` or :data:`ADMIN_KEY`.
    """
    path = Path(settings.control.key) if settings.control.key else control_folder(settings) / default
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        remedy = f"Name a file with a key, or start the control plane first: it makes {default}"
        raise ConfigError(f"the key cannot be read: {error}", key="control.key", remedy=remedy, file=path) from None


class StateManager:
    """Keeps the state of the control plane, see the module.

    Attributes:
        maps: entries by the names of :data:`MAPS`; replaced as a whole, so that whoever took one may go on reading it.
        failures: looks in a row without an answer.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._url = settings.control.url.rstrip("/")
        if not self._url.startswith(("http://", "https://")):
            raise ConfigError(f"{self._url!r} is no address", key="control.url", remedy="Write http://HOST:PORT")
        self._folder = settings.control_state
        self._node = secrets.token_hex(8)
        self._tag = ""
        self._written: Stamp | None = None
        self._key_sources: list[StateKeys[Any]] = []
        self._stop = threading.Event()
        self._tried = threading.Event()
        self._thread: threading.Thread | None = None
        self.maps: dict[str, dict[str, Any]] = {name: {} for name in MAPS}
        self.failures = 0
        self._load()

    def keys(self, kind: type[K], action: str) -> StateKeys[K]:
        """The keys with this action, for a :class:`KeyRing`."""
        made = StateKeys(kind, action)
        made.take(self.maps["keys"], whole=True)
        self._key_sources.append(made)
        return made

    def start(self) -> None:
        """Start the thread. Waits for its first look, so that a process does not begin with an old state."""
        self._thread = threading.Thread(target=self._run, name="state manager", daemon=True)
        self._thread.start()
        self._tried.wait(self._settings.control.refresh_ms / 1000 + _TIMEOUT_S)

    def stop(self) -> None:
        """End the thread. Waits for the look that is under way."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(self._settings.control.refresh_ms / 1000 + _TIMEOUT_S)

    def _run(self) -> None:
        import httpx

        hold_s = self._settings.control.refresh_ms / 1000
        with httpx.Client(base_url=self._url, timeout=hold_s + _TIMEOUT_S) as client:
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    changed = self._look(client, hold_s)
                except (httpx.HTTPError, *_BROKEN) as error:
                    changed = False
                    self.failures += 1
                    if self.failures == 1:
                        log.warning(
                            "the control plane at %s does not answer, its last state holds: %s", self._url, error
                        )
                else:
                    if self.failures:
                        log.info("the control plane at %s answers again", self._url)
                    self.failures = 0
                self._tried.set()
                if not changed:  # a control plane that is down, or a proxy that does not hold answers
                    self._stop.wait(began + hold_s - time.monotonic())

    def _look(self, client: Any, hold_s: float) -> bool:
        """Ask for changes; whether there were any."""
        headers = {"Authorization": f"Bearer {key_text(self._settings, MACHINE_KEY)}"}
        if self._tag:
            headers["If-None-Match"] = self._tag
        answer = client.get("/v1/state", params={"wait": hold_s, "node": self._node}, headers=headers)
        if answer.status_code not in (200, 304):
            raise ValueError(f"it answers {answer.status_code}: {answer.text[:200]}")
        changed = bool(answer.status_code == 200)
        if changed:
            self._take(orjson.loads(answer.content))
            self._tag = answer.headers["etag"]
        try:
            if changed or stamp_of(self._folder / STATE_FILE) != self._written:
                self._store()
        except OSError as error:
            log.error("the state of the control plane cannot be kept in %s: %s", self._folder, error)
        return changed

    def _take(self, state: Mapping[str, Any]) -> None:
        whole = bool(state.get("whole"))
        maps = {}
        for name in MAPS:
            changes = state[name]
            merged = {**({} if whole else self.maps[name]), **changes}
            maps[name] = {each: entry for each, entry in merged.items() if entry is not None}
        self.maps = maps
        for source in self._key_sources:
            source.take(state["keys"], whole=whole)

    def _load(self) -> None:
        path = self._folder / STATE_FILE
        try:
            self._take({**orjson.loads(path.read_bytes()), "whole": True})
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.error("%s is not used: %s", path, error)

    def _store(self) -> None:
        """Write what is known, unless another process of the machine has written the same."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(self._folder / "lock"):
            path = self._folder / STATE_FILE
            _write(path, orjson.dumps(self.maps))
            sources = self._folder / SOURCES_FOLDER
            sources.mkdir(exist_ok=True, mode=0o700)
            wanted = {f"{name}.toml": toml_text(entry).encode() for name, entry in self.maps["sources"].items()}
            for file in sources.glob("*.toml"):
                if file.name not in wanted:
                    file.unlink()
            for name, text in wanted.items():
                _write(sources / name, text)
            self._written = stamp_of(path)


def state_manager(settings: Settings) -> StateManager | None:
    """The state manager of this process, not started; None without a control plane. Raises ConfigError."""
    return StateManager(settings) if settings.control.url else None


@contextmanager
def following(settings: Settings) -> Iterator[None]:
    """Keep the state on disk up to date meanwhile, if there is a control plane. For processes that need no keys."""
    manager = state_manager(settings)
    if manager is None:
        yield
        return
    manager.start()
    try:
        yield
    finally:
        manager.stop()


class StateKeys(Generic[K]):
    """Keys with one action, for a :class:`KeyRing`.

    A rotated key has the id ``ID-2``, ``ID-3`` and so on. When the key ``ID`` is gone, its id stands for the newest of
    them: what was kept for the key, a webhook for instance, goes on.
    """

    required = True
    reload_s = 0.0

    def __init__(self, kind: type[K], action: str) -> None:
        self._names = {field.name for field in dataclasses.fields(kind)}
        self._kind = kind
        self._action = action
        self._own: dict[str, tuple[Mapping[str, Any], K]] = {}
        self._keys: dict[str, K] = {}
        self._changes = 0

    def __str__(self) -> str:
        return "the control plane's state"

    def stamp(self) -> object:
        return self._changes

    def read(self) -> dict[str, K]:
        return self._keys

    def take(self, changes: Mapping[str, Any], *, whole: bool) -> None:
        own = {} if whole else dict(self._own)
        for name, entry in changes.items():
            known = self._own.get(name)
            if entry is None or self._action not in entry["actions"]:
                own.pop(name, None)
            elif known is not None and known[0] == entry:  # a control plane that was started again says everything
                own[name] = known
            elif (key := self._key(name, entry)) is not None:
                own[name] = entry, key
            else:
                own.pop(name, None)
        keys = {name: key for name, (_, key) in own.items()}
        newest: dict[str, int] = {}
        for name in keys:
            root, dash, number = name.partition("-")
            if dash and root not in keys:
                newest[root] = max(newest.get(root, 0), int(number))
        self._own = own
        self._keys = keys | {root: keys[f"{root}-{number}"] for root, number in newest.items()}
        self._changes += 1

    def _key(self, name: str, entry: Mapping[str, Any]) -> K | None:
        values = {each: value for each, value in entry.items() if each in self._names}
        try:
            return build(self._kind, {**values, "id": name}, file=Path(STATE_FILE), at=f"keys.{name}")
        except ConfigError as error:  # of another version of Millrace: never more rights than it says
            log.error("a key is not used: %s", error)
            return None


def _write(path: Path, content: bytes) -> None:
    """Write a file in one step, unless it holds this already."""
    if not path.exists() or path.read_bytes() != content:
        write_whole(path, content, 0o600, durable=True)
