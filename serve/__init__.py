"""The serving tier: right of gold. Follows Delta tables without a JVM, and pushes every change to its subscribers.

::

    core       who gets which bytes, without I/O: hub, channels, ring, messages, positions, filters, live aggregates
    tables     a table's state, its tail, the lake's tables in memory, replay from the log
    push       ways to a subscriber: WebSocket, callbacks, server-sent events, long polling
    http       routes: rows, history and look-ups by key, queries, schemas, metrics
    sql        SQL over the lake, in worker processes
    webhooks   pushes to a URL
    access     keys, and the gate that every connection and request passes
    client     the Python client library
    app        composition
"""
