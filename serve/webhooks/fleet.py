"""All webhooks of a lake. Each is run by one server process, whichever first took its lock, which the system gives back
when that process ends, however it ends; then another takes it within a second."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from pathlib import Path

import httpx

from lakehouse.contract.settings import ServeSettings
from serve.hub import Hub
from serve.principal import Access
from serve.tables import Tables
from serve.webhooks.call import Caller
from serve.webhooks.model import Webhook
from serve.webhooks.runner import Runner
from serve.webhooks.sealed import sealer_of
from serve.webhooks.store import Store

log = logging.getLogger(__name__)

_LOOK_S = 1.0


class Fleet:
    """See the module.

    Args:
        folder: of the lake's webhooks.
        hub, tables, access: of this process.
        settings: bounds.

    Attributes:
        counts: deliveries by outcome.
        caller: for requests out of turn.
    """

    def __init__(self, folder: Path, hub: Hub, tables: Tables, access: Access, settings: ServeSettings) -> None:
        self.counts = dict.fromkeys(("delivered", "failed", "dead"), 0)
        self._folder = folder
        self._made: Store | None = None
        self._hub = hub
        self._tables = tables
        self._access = access
        self._settings = settings
        self._sealer = sealer_of(settings.webhook_key)
        self._running: dict[str, tuple[asyncio.Task[None], int]] = {}
        self._look = asyncio.Event()
        self._trust = httpx.create_ssl_context(trust_env=False)
        self.caller = self._caller(keeps=False)

    @property
    def running(self) -> int:
        """Webhooks that this process runs."""
        return len(self._running)

    async def store(self) -> Store:
        """Where they are kept; made when somebody first adds one."""
        if self._made is None:
            self._made = await asyncio.to_thread(Store, self._folder, self._settings.webhook_log, self._sealer)
        return self._made

    def changed(self) -> None:
        """One was added or removed."""
        self._look.set()

    async def run(self) -> None:
        """Start and stop runners. Runs until it is cancelled."""
        async with self.caller:
            try:
                await self._watch()
            finally:
                for ident in list(self._running):
                    await self._stop(ident)
                if self._made is not None:
                    self._made.close()

    async def _watch(self) -> None:
        while True:
            try:
                if self._made is not None or (self._folder / "webhooks.db").exists():
                    await self._reconcile()
            except Exception:
                log.exception("webhooks could not be looked at")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._look.wait()
            self._look.clear()

    async def _reconcile(self) -> None:
        store = await self.store()
        known = await asyncio.to_thread(store.all)
        for ident in list(self._running):
            if ident not in known:
                await self._stop(ident)
                (self._folder / f"{ident}.lock").unlink(missing_ok=True)
        for ident, hook in known.items():
            if ident in self._running:
                task, _ = self._running[ident]
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    log.error("webhook %s failed", ident, exc_info=error)
                    await self._stop(ident)
                continue
            _, state, _ = await asyncio.to_thread(store.progress, ident)
            if state != "stopped" and (lock := self._locked(ident)) is not None:
                self._running[ident] = asyncio.create_task(self._call(hook, store)), lock

    async def _call(self, hook: Webhook, store: Store) -> None:
        async with self._caller(keeps=True) as caller:
            await Runner(hook, self._hub, self._tables, self._access, store, caller, self._settings, self.counts).run()

    def _caller(self, *, keeps: bool) -> Caller:
        settings = self._settings
        return Caller(settings.webhook_timeout_s, private=settings.webhook_private, trust=self._trust, keeps=keeps)

    def _locked(self, ident: str) -> int | None:
        handle = os.open(self._folder / f"{ident}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            return None
        return handle

    async def _stop(self, ident: str) -> None:
        task, lock = self._running.pop(ident)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        os.close(lock)
