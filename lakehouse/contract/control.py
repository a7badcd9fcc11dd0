"""What a process knows of the control plane: keys, tenants, apps and sources, refreshed by a thread of its own.

The control plane answers ``GET /v1/state`` with a JSON object of four maps: ``tenants`` by name, ``apps`` by
``TENANT/APP``, ``keys`` by id and ``sources`` by name. With ``If-None-Match`` it answers the entries that have changed
since; null says that one is gone. ``wait`` makes it hold the answer until there is a change.

Hot paths read the maps in memory and never wait. The last good state is in :attr:`Settings.control_state`, where a
process that starts while the control plane is down finds it. Processes of one machine may share the folder.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Generic

import orjson

from lakehouse.contract.errors import ConfigError, MillraceError
from lakehouse.contract.keys import K, KeySource
from lakehouse.contract.settings import Settings
from lakehouse.contract.storage import Stamp, locked, stamp_of, write_whole
from lakehouse.contract.tomlfile import build, toml_text

log = logging.getLogger(__name__)

MAPS = ("tenants", "apps", "keys", "sources")
STATE_FILE = "state.json"
SOURCES_FOLDER = "sources"
MACHINE_KEY = "machine.key"
ADMIN_KEY = "admin.key"
_TIMEOUT_S = 3.0  # beyond the time that an answer is held
_BROKEN = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    MillraceError,
)  # also an answer of somebody else


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

    def keys(self, kind: type[K], action: str) -> KeySource[K]:
        """The keys with this action, for a :class:`~lakehouse.contract.keys.KeyRing`."""
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


@contextlib.contextmanager
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
    """Keys with one action, as a key ring takes them: a :class:`~lakehouse.contract.keys.KeySource`.

    A rotated key has the id ``ID-2``, ``ID-3`` and so on. When the key ``ID`` is gone, its id stands for the newest of
    them: what was kept for the key, a webhook for instance, goes on.
    """

    required = True
    reload_s = 0.0

    def __init__(self, kind: type[K], action: str) -> None:
        self._names = {field.name for field in fields(kind)}
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
