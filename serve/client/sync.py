"""The client for programs without asyncio: subscriptions and publishers run in a thread of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from serve.client.publish import EventState, Publisher
from serve.client.subscription import Message, Subscription

_T = TypeVar("_T")
_C = TypeVar("_C", bound=AbstractAsyncContextManager[Any])


class _InThread(Generic[_C]):
    """Enters and leaves an asynchronous object in the loop of a thread."""

    def __init__(self, state: _C, name: str) -> None:
        self.state = state
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)

    def __enter__(self) -> Self:
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


class SyncSubscription(_InThread[Subscription]):
    """Makes a subscription one to enter with ``with`` and to read with ``for``.

    ``with SyncSubscription(subscribe(URL, TABLE)) as messages``. Several threads may read it, each with a
    :meth:`reader` of its own.

    Attributes:
        state: the subscription itself; read ``position``, ``behind``, ``lag_ms``, ``slow`` and ``keeping_up`` there.
    """

    def __init__(self, subscription: Subscription) -> None:
        super().__init__(subscription, f"subscription {subscription.table}")

    def __iter__(self) -> Iterator[Message]:
        return self.reader()

    def reader(self) -> Iterator[Message]:
        """One more reader. Asking it for the next message says that the one before is processed."""
        messages = self.state.reader()

        async def following() -> Message:
            return await anext(messages)

        while True:
            yield self._wait(following())


class SyncPublisher(_InThread[Publisher]):
    """Makes a publisher one to enter with ``with``: ``with SyncPublisher(Publisher(…)) as publisher``."""

    def __init__(self, publisher: Publisher) -> None:
        super().__init__(publisher, f"publisher {publisher.source}")

    def publish(self, *events: Mapping[str, Any]) -> list[str]:
        """As :meth:`Publisher.publish`."""
        return self._wait(self.state.publish(*events))

    def settled(self) -> None:
        """As :meth:`Publisher.settled`."""
        self._wait(self.state.settled())

    def rejected(self) -> list[tuple[EventState, bytes]]:
        """As :meth:`Publisher.rejected`."""
        return self._wait(self.state.rejected())

    def forget(self, ids: Iterable[str]) -> None:
        """As :meth:`Publisher.forget`."""
        self._wait(self.state.forget(ids))
