"""The Python client library: subscribe to a table, come back where you stopped, apply each change once.

::

    async with subscribe("http://127.0.0.1:8400", "top_topics", store=FileStore("top_topics.position")) as topics:
        async for message in topics:
            ...  # a Snapshot replaces what you hold, a Change is applied to it

Asking for the next message says that the one before is processed.

Errors::

    MillraceError
    └── ClientError
        ├── Refused       the server will not serve this request: another table, or no position
        └── BadMessage    the server said something that is not of the protocol
"""

from __future__ import annotations

from serve.client.subscription import (
    BadMessage,
    Change,
    ClientError,
    FileStore,
    MemoryStore,
    Message,
    PositionStore,
    Refused,
    RetryPolicy,
    Snapshot,
    Subscription,
    TableQuery,
    TableView,
    subscribe,
)

__all__ = [
    "BadMessage",
    "Change",
    "ClientError",
    "FileStore",
    "MemoryStore",
    "Message",
    "PositionStore",
    "Refused",
    "RetryPolicy",
    "Snapshot",
    "Subscription",
    "TableQuery",
    "TableView",
    "subscribe",
]
