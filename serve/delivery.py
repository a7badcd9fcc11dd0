"""What the hub wants done, what it has counted, and how the former is carried out."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from serve.errors import RequestError
from serve.subscriber import Subscriber

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a transport has to do.

    Attributes:
        to: for whom.
        data: bytes to write, now, whatever the transport's buffer holds.
        wake: ask :meth:`serve.hub.Hub.data_to_send` for each of them.
        close: close code; 0: stay connected.
        reason: of the close.
    """

    to: tuple[Subscriber, ...]
    data: bytes = b""
    wake: bool = False
    close: int = 0
    reason: str = ""


@dataclass(slots=True)
class Counters:
    """What has happened since the start, for metrics."""

    subscribed: int = 0
    messages: int = 0
    bytes: int = 0
    snapshots: int = 0
    resumed: int = 0
    conflated: int = 0
    slow: int = 0
    cut: int = 0
    refused: int = 0
    expired: dict[str, int] = field(default_factory=lambda: {"log": 0, "lagged": 0, "filter": 0})


def deliver(deliveries: Iterable[Delivery]) -> None:
    """Carry out what the hub says."""
    for delivery in deliveries:
        if delivery.data:
            for subscriber in delivery.to:
                subscriber.link.write(delivery.data)
        if delivery.wake:
            for subscriber in delivery.to:
                _woken(subscriber)
        if delivery.close:
            for subscriber in delivery.to:
                subscriber.link.close(delivery.close, delivery.reason)


def _woken(subscriber: Subscriber) -> None:
    """What fails for one of them is nothing to the others."""
    try:
        subscriber.link.pump()
    except Exception:
        log.exception("%s: the subscription failed", subscriber.label)
        subscriber.link.close(RequestError.FAILED, "the server failed; its log says how")
