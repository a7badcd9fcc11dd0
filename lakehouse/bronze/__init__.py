"""The record: raw events with their envelope, append-only."""
