"""What senders are told: acknowledgement tokens, answers computed from an event, look-ups, publish/subscribe."""
