"""Webhooks: subscribers that are called. Snapshot, then changes, signed, in order, until each was taken.

::

    model     a webhook, and what is kept of a delivery
    sealed    signing secrets, encrypted
    store     both, in SQLite below the lake's state: every server process sees them
    guard     where a webhook may call
    call      one signed request, and whether it was taken
    link      what comes next, out of the hub
    runner    one webhook as a subscriber of the hub: retries, dead letters
    fleet     the webhooks of a lake, each run by one server process
    routes    HTTP
"""
