"""The serving tier: right of gold. Follows Delta tables without a JVM, and pushes every change to whoever subscribed.

::

    reader, state             a table's files and rows            messages, rows    what is sent, as JSON
    tail                      one a table                         ring, hub         who gets it, without I/O
    tables                    the lake's tables and their tails   push              ways to a subscriber
    replay                    changes from before the ring        query, sql        SQL over the lake
    filters, live, shown      views of a subscriber's own         position          signed places in a table's log
    security, principal       who may see what                    lookup, history   rows by key, rows of then
    webhooks                  pushes to a URL                     control           queries by REST
    app, routes               composition                         client            the Python client library
    schemas                   the messages' fields                openapi, asyncapi the documents of it all
"""
