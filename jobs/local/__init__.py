"""What runs on this machine: the broker, the supervised parts, and what they need."""
