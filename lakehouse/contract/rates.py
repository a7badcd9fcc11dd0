"""How fast somebody may go: a token bucket, for senders and readers alike. No clock of its own."""

from __future__ import annotations


class TokenBucket:
    """Lets ``rate`` things a second through, and as many at once as come in a second.

    A batch that is larger passes when the bucket is not empty, and leaves a debt: so that a rate below the size of a
    batch does not refuse it for ever.

    Args:
        rate: things a second.
        now: seconds, monotonic.
    """

    __slots__ = ("_left", "_then", "rate")

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._left = float(rate)
        self._then = now

    def take(self, count: int, now: float) -> float:
        """Take so many; 0, or the seconds after which it is worth another try (then none were taken)."""
        wait = self.wait(now)
        if not wait:
            self._left -= count
        return wait

    def wait(self, now: float) -> float:
        """0 where something may be taken, else the seconds after which it is worth another try."""
        self._left = min(self.rate, self._left + (now - self._then) * self.rate)
        self._then = now
        return max(0.001, -self._left / self.rate) if self._left <= 0 else 0.0
