"""The Python client library: subscribe to a table, come back where you stopped, apply each change once.

::

    async with subscribe("http://127.0.0.1:8400", "top_topics", store=FileStore("top_topics.position")) as topics:
        async for message in topics:
            ...  # a Snapshot replaces what you hold, a Change is applied to it

Asking for the next message says that the one before is processed. :class:`Publisher` sends events to a collector and
loses none; :class:`ExactlyOnce` calls a third party that is not idempotent. :class:`SyncSubscription` and
:class:`SyncPublisher` are for programs without asyncio.

Errors::

    MillraceError
    └── ClientError
        ├── Declined             raised by your handler: the third party refuses for good
        ├── Refused              the server will not serve this request; it has a code and a detail
        │   ├── NoSuchTable      no such table, or none that the key may read
        │   ├── Unauthorized     no key, or an unknown or revoked one
        │   ├── Forbidden        not from here, or not with this key
        │   └── BadFilter        the condition, columns or aggregate
        └── BadMessage           the server said something that is not of the protocol
"""

from __future__ import annotations

from serve.client.once import Declined, ExactlyOnce, OnceHandler, SeenItem, SeenStore, SqliteSeen
from serve.client.publish import EventState, Publisher, PublisherOptions, SyncPublisher
from serve.client.stores import FileStore, MemoryStore, PositionStore, SqliteStore
from serve.client.subscription import (
    Change,
    ClientOptions,
    Message,
    SlowNotice,
    Snapshot,
    Subscription,
    SyncSubscription,
    TableQuery,
    TableView,
    subscribe,
)
from serve.client.transports import (
    BadFilter,
    BadMessage,
    ClientError,
    Forbidden,
    NoSuchTable,
    Refused,
    Unauthorized,
)

__all__ = [
    "BadFilter",
    "BadMessage",
    "Change",
    "ClientError",
    "ClientOptions",
    "Declined",
    "EventState",
    "ExactlyOnce",
    "FileStore",
    "Forbidden",
    "MemoryStore",
    "Message",
    "NoSuchTable",
    "OnceHandler",
    "PositionStore",
    "Publisher",
    "PublisherOptions",
    "Refused",
    "SeenItem",
    "SeenStore",
    "SlowNotice",
    "Snapshot",
    "SqliteSeen",
    "SqliteStore",
    "Subscription",
    "SyncPublisher",
    "SyncSubscription",
    "TableQuery",
    "TableView",
    "Unauthorized",
    "subscribe",
]
