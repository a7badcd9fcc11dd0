"""Publish/subscribe collection: one WebSocket both publishes events and subscribes to products by key."""

from ingest.pubsub.feed import Feed
from ingest.pubsub.interests import Interests, Key
from ingest.pubsub.protocol import PATH, StreamProtocol
from ingest.pubsub.streams import Streams

__all__ = ["PATH", "Feed", "Interests", "Key", "StreamProtocol", "Streams"]
