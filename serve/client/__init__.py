"""The Python client library: subscribe to a table, come back where you stopped, apply each change once.

::

    async with subscribe("http://127.0.0.1:8400", "top_topics", store=FileStore("top_topics.position")) as topics:
        async for message in topics:
            ...  # a Snapshot replaces what you hold, a Change is applied to it

Asking for the next message says that the one before is processed. :class:`SyncSubscription` is for programs without
asyncio.

Errors::

    MillraceError
    └── ClientError
        ├── Refused              the server will not serve this request; it has a code and a detail
        │   ├── NoSuchTable      no such table, or none that the key may read
        │   ├── Unauthorized     no key, or an unknown or revoked one
        │   ├── Forbidden        not from here, or not with this key
        │   └── BadFilter        the condition, columns or aggregate
        └── BadMessage           the server said something that is not of the protocol
"""

from __future__ import annotations

from serve.client.subscription import (
    Change,
    ClientOptions,
    FileStore,
    MemoryStore,
    Message,
    PositionStore,
    SlowNotice,
    Snapshot,
    Subscription,
    TableQuery,
    TableView,
    subscribe,
)
from serve.client.sync import SyncSubscription
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
    "FileStore",
    "Forbidden",
    "MemoryStore",
    "Message",
    "NoSuchTable",
    "PositionStore",
    "Refused",
    "SlowNotice",
    "Snapshot",
    "Subscription",
    "SyncSubscription",
    "TableQuery",
    "TableView",
    "Unauthorized",
    "subscribe",
]
