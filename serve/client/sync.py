"""A subscription for programs without asyncio: it runs in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from types import TracebackType
from typing import Any, TypeVar

from serve.client.subscription import Message, Subscription

_T = TypeVar("_T")


class SyncSubscription:
    """Makes a subscription one to enter with ``with`` and to read with ``for``.

    ``with SyncSubscription(subscribe(URL, TABLE)) as messages``. Several threads may read it, each with a
    :meth:`reader` of its own.

    Attributes:
        state: the subscription itself; read ``position``, ``behind``, ``lag_ms``, ``slow`` and ``keeping_up`` there.
    """

    def __init__(self, subscription: Subscription) -> None:
        self.state = subscription
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"subscription {subscription.table}", daemon=True
        )

    def __enter__(self) -> SyncSubscription:
        self._thread.start()
        try:
            self._wait(self.state.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._wait(self.state.__aexit__(kind, error, trace))
        finally:
            self._stop()

    def __iter__(self) -> Iterator[Message]:
        return self.reader()

    def reader(self) -> Iterator[Message]:
        """One more reader. Asking it for the next message says that the one before is processed."""
        messages = self.state.reader()

        async def following() -> Message:
            return await anext(messages)

        while True:
            yield self._wait(following())

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
