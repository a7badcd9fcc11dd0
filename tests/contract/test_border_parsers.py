"""Every parser that ``make fuzz`` knows takes its seeds and some hundred damaged copies, or refuses them in its way."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from tests.fuzz import PARSERS

JUNK = (
    b"",
    b"\0",
    b"\xff\xfe",
    b"'",
    b'"',
    b"(",
    b")",
    b"[" * 9,
    b"{",
    b"\r\n",
    b"%",
    b"--",
    b";",
    b"9" * 30,
    "é".encode(),
)


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_takes_an_input_or_refuses_it(name: str) -> None:
    parse, declared = PARSERS[name].make()
    chance = random.Random(name)
    for seed in PARSERS[name].seeds:
        with suppress(*declared):
            parse(seed)
        for _ in range(round(150 * PARSERS[name].share)):
            start, end = sorted(chance.choices(range(len(seed) + 1), k=2))
            with suppress(*declared):
                parse(seed[:start] + chance.choice(JUNK) + seed[end:])
