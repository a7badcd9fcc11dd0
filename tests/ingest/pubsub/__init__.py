"""Publish/subscribe collection."""
