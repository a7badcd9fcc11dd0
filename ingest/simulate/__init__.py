"""A live upstream for demos and tests, which plays recordings or invented events."""
