"""Ways to a subscriber, one module a transport. The hub decides what is sent, and when."""
