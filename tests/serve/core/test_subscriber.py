from __future__ import annotations

from serve.core.subscriber import Outgoing, Subscriber, deliver
from serve.errors import RequestError
from tests.serve.core.test_hub import CODEC, Socket


class Broken(Socket):
    """A link that fails."""

    def pump(self) -> None:
        raise OSError("no such socket")


class Counting(Socket):
    """A link that counts how often it was woken."""

    woken = 0

    def pump(self) -> None:
        self.woken += 1


def test_a_link_that_fails_is_closed_and_the_others_are_served() -> None:
    broken, sound = Broken(), Counting()
    deliver([Outgoing((Subscriber(broken, CODEC), Subscriber(sound, CODEC)), wake=True)])
    assert (broken.closed, sound.closed, sound.woken) == (RequestError.FAILED, 0, 1)
