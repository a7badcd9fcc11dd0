"""``POST /v1/sql``: SQL over the lake and its history, read-only and bounded.

::

    statement   what may be said, and the tables that it sees: without I/O of its own but Delta's and DuckDB's
    worker      a process that runs one statement at a time; killed when one takes too long, or nobody waits for it
    pool        the server's workers
    routes      HTTP
"""
