"""SQL over the lake and its history, read-only and bounded: ``POST /v1/sql`` and ``millrace sql``.

::

    statement   what is allowed, the tables that it sees, and its result
    worker      a process that runs one statement at a time; killed if it takes too long or nobody waits
    pool        the server's workers
    routes      HTTP
"""
