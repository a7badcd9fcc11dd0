"""Webhooks: subscribers that are called. A snapshot, then changes, signed, in order, each until it was taken.

::

    store     webhooks and their deliveries in SQLite; every server process sees them
    call      where a webhook may call, and one signed request
    runner    one webhook as a subscriber of the hub, with retries and dead letters; which process runs which
    routes    HTTP
"""
