"""Readers: each format as JSON payloads; reading on from any place gives the rest."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import random
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakehouse.contract.errors import ConfigError
from lakehouse.errors import BadFile
from lakehouse.load import files, readers
from lakehouse.load.files import OpenFile, find, fingerprint_of, format_of
from lakehouse.load.rows import FilePosition, Segment
from tests.lakehouse.load.offers import SOURCE, offers

HEADER = b"merchant,offer,version,title,price,available\n"


def segments(text: bytes, kind: str, done: FilePosition | None = None, **options: Any) -> list[Segment]:
    return list(readers.read(OpenFile("f", io.BytesIO(text), kind, **options), SOURCE, done or FilePosition("f")))


def rows(text: bytes, kind: str, **options: Any) -> tuple[list[bytes], list[str]]:
    """Good payloads, and reasons of the refused ones."""
    found = segments(text, kind, **options)
    assert [segment.ended for segment in found] == [False] * (len(found) - 1) + [True]
    good = [p for s in found for i, p in enumerate(s.payloads) if i not in s.refused]
    return good, [reason for segment in found for reason in segment.refused.values()]


def parsed(text: bytes, kind: str, **options: Any) -> list[dict[str, Any]]:
    return [json.loads(payload) for payload in rows(text, kind, **options)[0]]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (files, readers):
        monkeypatch.setattr(module, "BLOCK", 64)
    monkeypatch.setattr(readers, "_BATCH", 3)


def test_json_lines_are_untouched() -> None:
    text = b'\xef\xbb\xbf{"a" : 1}\r\n\n  \n{"b":2.50}\n{"c":3}'
    assert rows(text, "jsonl")[0] == [b'{"a" : 1}', b'{"b":2.50}', b'{"c":3}']


def test_an_overlong_line_is_cut_and_the_next_is_whole(small_blocks: None) -> None:
    source = replace(SOURCE, max_event_bytes=100)
    text = b'{"a":1}\n' + b"x" * 5_000 + b'\n{"b":2}\n'
    opened = OpenFile("f", io.BytesIO(text), "jsonl")
    found = [p for s in readers.read(opened, source, FilePosition("f")) for p in s.payloads]
    assert [found[0], found[-1]] == [b'{"a":1}', b'{"b":2}']
    assert len(found) == 3
    assert 100 < len(found[1]) < 300


def test_csv_values_have_the_types_of_the_schema() -> None:
    text = HEADER + b'm1,"a ""b"", c",007,"two\nlines",1.5e2,TRUE\nm2,o,x1,,n/a,maybe\n'
    assert parsed(text, "csv") == [
        {"merchant": "m1", "offer": 'a "b", c', "version": 7, "title": "two\nlines", "price": 150, "available": True},
        {"merchant": "m2", "offer": "o", "version": "x1", "title": None, "price": "n/a", "available": "maybe"},
    ]


def test_other_delimiters_and_encodings() -> None:
    text = "merchant;title\nm1;Blåbär\n"
    assert parsed(text.encode("cp1252"), "csv", delimiter=";", encoding="cp1252") == [
        {"merchant": "m1", "title": "Blåbär"}
    ]
    assert parsed(text.encode("utf-16"), "csv", delimiter=";", encoding="utf-16")[0]["title"] == "Blåbär"
    assert parsed(text.replace(";", "\t").encode(), "tsv")[0]["merchant"] == "m1"


def test_a_bad_row_costs_one_row() -> None:
    text = HEADER + b'm1,o1,1,t,1,true\nm2,o2\nm3,"o"x y",1,t,1,true\nm4,o4,1,a 5" pipe,1,true\nm5,o5,1,t,1,true,more\n'
    good, reasons = rows(text, "csv")
    assert [json.loads(row)["merchant"] for row in good] == ["m1", "m4"]
    assert sorted(reasons)[0] == "broken CSV: ',' expected after '\"'"
    assert {"broken CSV: 2 fields, the header has 6", "broken CSV: 7 fields, the header has 6"} < set(reasons)


@pytest.mark.parametrize(
    ("text", "kind", "problem"),
    [
        (HEADER + b'm1,"o1,1,t,1,true\nm2,o2,1,t,1,true\n', "csv", "a quote is not closed"),
        (HEADER + b'm1,"o1', "csv", "a quote is not closed"),
        (HEADER + b"m1,\xe9,1,t,1,true\n", "csv", "not utf-8 (byte 0xe9"),
        (HEADER.decode().encode("utf-16"), "csv", "UTF-16 text; give --encoding"),
        (b"", "csv", "no header"),
        (b"a,A\n", "csv", "the same name"),
        (b"a,b\0\n1,2\n", "csv", "a NUL character"),
        (b' [{"a":1}]', "jsonl", "a JSON array"),
        ('{"a":1}'.encode("utf-16"), "jsonl", "UTF-16 text"),
        (gzip.compress(random.Random(1).randbytes(5_000).hex().encode(), mtime=0)[:-900], "jsonl", "cut off after"),
        (gzip.compress(b"x" * 500, mtime=0)[:10] + b"\x07" * 30, "jsonl", "damaged gzip"),
        (b"PAR1 and no more", "parquet", "unreadable Parquet"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(text: bytes, kind: str, problem: str) -> None:
    with pytest.raises(BadFile) as caught:
        rows(text, kind)
    assert problem in str(caught.value)


def test_a_text_of_another_encoding_than_given() -> None:
    with pytest.raises(BadFile, match="not ascii"):
        rows("merchant\nÅ\n".encode(), "csv", encoding="ascii")


def test_parquet_rows_are_json_objects() -> None:
    made = [{"a": 1, "b": {"c": [1.5, None]}, "d": "x"}, {"a": None, "b": None, "d": "é"}]
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(made), out, row_group_size=1)
    assert parsed(out.getvalue(), "parquet") == made


cells = st.text(st.characters(codec="utf-8", exclude_characters="\r\x00"), max_size=12)
tables = st.lists(st.tuples(cells, cells, st.integers(0, 99)), max_size=12)


def test_resumed_parquet_file_keeps_a_smaller_last_row_group() -> None:
    made = [("m", "t", number) for number in range(9)]  # row groups of 4, 4 and 1
    resumed = segments(_text(made, "parquet"), "parquet", FilePosition("f", rows=3))
    assert [json.loads(p)["version"] for segment in resumed for p in segment.payloads] == [3, 4, 5, 6, 7, 8]


@settings(max_examples=30)
@given(tables, st.sampled_from(["csv", "jsonl", "parquet"]), st.booleans(), st.data())
def test_reading_on_from_any_place_gives_the_rest(
    made: list[tuple[str, str, int]], kind: str, packed: bool, data: st.DataObject
) -> None:
    text = _text(made, kind)
    if packed and kind != "parquet":
        text = gzip.compress(text)
    with pytest.MonkeyPatch.context() as patch:
        for module in (files, readers):
            patch.setattr(module, "BLOCK", 64)
        patch.setattr(readers, "_BATCH", 3)
        whole = segments(text, kind)
        count = data.draw(st.integers(0, len(whole) - 1))
        before = [payload for segment in whole[:count] for payload in segment.payloads]
        after = [payload for segment in whole[count:] for payload in segment.payloads]
        assert len(before + after) == len(made)
        offset = whole[count - 1].offset if count else 0
        resumed = segments(text, kind, FilePosition("f", rows=len(before), offset=offset))
        assert [payload for segment in resumed for payload in segment.payloads] == after
        counted = segments(text, kind, FilePosition("f", rows=len(before), offset=-1))
        assert [payload for segment in counted for payload in segment.payloads] == after
        if kind != "parquet":
            assert whole[-1].offset == len(_text(made, kind))


def _text(made: list[tuple[str, str, int]], kind: str) -> bytes:
    fields = [{"merchant": merchant, "title": title, "version": version} for merchant, title, version in made]
    if kind == "jsonl":
        return b"".join(json.dumps(row).encode() + b"\n" for row in fields)
    if kind == "csv":
        out = io.StringIO()
        writer = csv.DictWriter(out, ["merchant", "title", "version"], lineterminator="\n", quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows(fields)
        return out.getvalue().encode()
    packed = io.BytesIO()
    schema = pa.schema([("merchant", pa.string()), ("title", pa.string()), ("version", pa.int64())])
    pq.write_table(pa.Table.from_pylist(fields, schema=schema), packed, row_group_size=4)
    return packed.getvalue()


def test_files_are_found_once_and_unfinished_ones_passed_over(tmp_path: Path) -> None:
    for name in ("a/1.csv", "a/b/2.csv.gz", "a/3.csv.part", "a/.4.csv", "5.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find([tmp_path / "a", str(tmp_path / "**" / "*.csv*"), tmp_path / "5.jsonl"])
    assert [file.path.name for file in found] == ["1.csv", "2.csv.gz", "5.jsonl"]
    with pytest.raises(ConfigError, match="there is no file"):
        find([tmp_path / "none*"])


def test_formats_by_name_and_by_content(tmp_path: Path) -> None:
    made = {"a.csv.gz": b"", "b": b'{"x":1}', "c": b"x,y\n1,2", "d": gzip.compress(b' {"x":1}'), "e": b"PAR1...."}
    for name, text in made.items():
        (tmp_path / name).write_bytes(text)
    found = {}
    for name in made:
        with (tmp_path / name).open("rb") as file:
            found[name] = format_of(tmp_path / name, file)
            assert fingerprint_of(file) == fingerprint_of(file)
    assert found == {"a.csv.gz": "csv", "b": "jsonl", "c": "csv", "d": "jsonl", "e": "parquet"}
    (tmp_path / "z").write_bytes(b"who knows")
    with (tmp_path / "z").open("rb") as file, pytest.raises(BadFile, match="give --format"):
        format_of(tmp_path / "z", file)


def test_feed_generator_rows_survive_every_format() -> None:
    made = offers(3)
    assert [json.loads(row) for row in rows(_lines(made), "jsonl")[0]] == made


def _lines(made: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in made)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
@pytest.mark.parametrize("first", [b"", b"a,b\n"])
def test_a_packed_file_that_grows_a_thousandfold_takes_little_memory(kind: str, first: bytes) -> None:
    packed = gzip.compress(first + bytes(50_000_000))
    assert len(packed) < 100_000
    tracemalloc.start()
    with contextlib.suppress(BadFile):
        for _ in readers.read(OpenFile("f", io.BytesIO(packed), kind), SOURCE, FilePosition("f")):
            pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 128_000_000
