"""The border between untrusted senders and the message log: who may send, what an event must be, and load shedding."""
