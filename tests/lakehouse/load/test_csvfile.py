"""Values of CSV: what they are as JSON, by the types of the schema."""

from __future__ import annotations

import csv
import io
import json
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from lakehouse.contract.pipeline.source import Source
from lakehouse.load.files import OpenFile
from lakehouse.load.readers import read_csv

SOURCE = Source(
    topic="t", schema="Number BIGINT, `price` DOUBLE, ok BOOLEAN, text STRING", event_time="now()", name="things"
)
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")

numbers = st.one_of(
    st.from_regex(r"[-+]?0{0,2}[0-9]{1,19}", fullmatch=True),
    st.from_regex(r" ?-?[0-9]{1,17}(\.[0-9]{1,9})?([eE][-+]?[0-9]{1,2})? ?", fullmatch=True),
    st.integers(-(10**18), 10**18).map(str),
    st.decimals(-(10**6), 10**6, places=3).map(str),
    st.sampled_from(["", "-0", "0", "-", "1.", ".5", "0x1F", "1_000", "NaN", "true", "1e400", "0.00001", "70.30"]),
)
flags = st.sampled_from(["true", "false", "TRUE", " False", "", "yes", "1"])
texts = st.text(st.characters(codec="utf-8", exclude_characters="\r\x00"), max_size=12)


def payloads(cells: list[tuple[str, str, str, str]]) -> list[bytes]:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerows([["number", "price", "ok", 'a "text"'], *cells])
    found = read_csv(OpenFile("f", io.BytesIO(out.getvalue().encode()), "csv"), SOURCE, 0)
    return [payload for segment in found for payload in segment.payloads]


def integer(text: str) -> int | str | None:
    return (int(text) if _INTEGER.fullmatch(text.strip(" ")) else text) if text else None


def number(text: str) -> float | str | None:
    return (float(text) if _NUMBER.fullmatch(text.strip(" ")) else text) if text else None


def flag(text: str) -> bool | str | None:
    return {"true": True, "false": False}.get(text.strip(" ").lower(), text) if text else None


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(numbers, numbers, flags, texts), min_size=1, max_size=20))
def test_a_value_is_of_its_type_or_stays_text(cells: list[tuple[str, str, str, str]]) -> None:
    found = [json.loads(payload) for payload in payloads(cells)]
    for row in found:
        row["price"] = float(row["price"]) if isinstance(row["price"], int) else row["price"]
    wanted = [{"number": integer(a), "price": number(b), "ok": flag(c), 'a "text"': d or None} for a, b, c, d in cells]
    assert found == wanted


def test_numbers_stand_as_they_were_written() -> None:
    assert payloads([("-12", "3.250", "true", "ü/\t"), ("+007", " 1e5", "FALSE", "")]) == [
        b'{"number":-12,"price":3.250,"ok":true,"a \\"text\\"":"\xc3\xbc/\\t"}',
        b'{"number":7,"price":1e5,"ok":false,"a \\"text\\"":null}',
    ]
