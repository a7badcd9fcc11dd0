"""The serving tier: right of gold. Follows Delta tables without a JVM, and pushes every change to whoever subscribed.

::

    deltalog, reader, state   a table's log, files and rows       messages, rows    what is sent, as JSON
    tail                      one a table                         ring, hub         who gets it, without I/O
    tables                    the lake's tables and their tails   push              ways to a subscriber
    replay                    changes from before the ring        query             SQL over the lake
    app                       composition                         client            the Python client library
"""
