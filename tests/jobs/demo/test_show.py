"""Where the demo listens."""

from __future__ import annotations

import io
import socket

from rich.console import Console

from jobs.demo.show import free_or_other
from jobs.local.stack import free_port


def test_demo_takes_its_port_or_says_which_other_one() -> None:
    said = io.StringIO()
    console = Console(file=said)
    port = free_port()
    assert free_or_other("the dashboard", "127.0.0.1", port, console) == port
    assert said.getvalue() == ""
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        found = free_or_other("the dashboard", "127.0.0.1", port, console)
    assert found != port
    assert said.getvalue() == f"port {port} is taken, so the dashboard is at port {found}\n"


def test_any_free_port_is_not_a_surprise() -> None:
    said = io.StringIO()
    assert free_or_other("the dashboard", "127.0.0.1", 0, Console(file=said)) > 0
    assert said.getvalue() == ""
