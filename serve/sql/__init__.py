"""SQL over the lake and its history, read-only and bounded: ``POST /v1/sql`` and ``millrace sql``.

::

    payloads    the payloads of a source as columns
    statement   what is allowed, the tables that it sees, its result, and the process that runs it
    routes      HTTP, and the server's processes
"""
