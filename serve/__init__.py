"""The serving tier: right of gold. Follows Delta tables without a JVM, and pushes every change to its subscribers.

::

    core       who gets which bytes, without I/O: hub, channels, ring, messages, codecs, positions
    views      filters and live aggregates of a subscriber's own, under its principal's condition
    tables     a table's state, its tail, the lake's tables in memory, replay from the log
    push       ways to a subscriber: WebSocket, callbacks, server-sent events, long polling
    http       routes: rows and history, look-ups by key, queries, schemas, metrics
    sql        SQL over the lake, in worker processes
    webhooks   pushes to a URL
    security   principals, and the gate that admits them
    client     the Python client library
    app        composition
"""
