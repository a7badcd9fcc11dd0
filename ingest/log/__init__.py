"""The message log: one durable local store for events that Kafka has not acknowledged.

``message_log`` is the log itself, ``protocols`` decides when it writes, ``recovery`` reads it after a restart,
``inspection`` serves the command line. ``events``, ``records`` and ``segments`` are the data, its bytes and its files.
"""
