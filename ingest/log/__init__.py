"""The message log: one durable local store for events that Kafka has not acknowledged.

``message_log`` is the log itself, ``protocols`` decides when it writes, ``recovery`` reads it after a restart, and for
operators. ``segments`` is what it holds: data and bytes.
"""
