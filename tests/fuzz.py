"""``make fuzz``: a million made-up inputs for every parser at the border, guided by coverage (Atheris).

A parser may take an input or refuse it with the error that it declares. Any other exception, and an input that takes
longer than :data:`HANG_S`, ends the run of that parser; the input is kept in ``dist/fuzz`` and is run again with
``python -m tests.fuzz PARSER dist/fuzz/PARSER-crash-…``. ``make fuzz ARGS="--inputs 20000 condition query"`` runs a
part. The last line is one JSON object with the inputs of each parser.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "dist" / "fuzz"
INPUTS = 1_000_000
HANG_S = 10
LONGEST = 2_000


@dataclass(frozen=True)
class Parser:
    """A parser at the border.

    Attributes:
        make: imports it and gives it as a function of bytes, and the errors that it declares.
        seeds: inputs to begin with.
        share: of the inputs that are asked for; a parser that starts DuckDB for each takes fewer.
    """

    make: Callable[[], tuple[Callable[[bytes], object], tuple[type[Exception], ...]]]
    seeds: tuple[bytes, ...]
    share: float = 1.0


def http_head() -> Any:
    from ingest.collectors.wire import parse_head

    return parse_head.__wrapped__, ()


def event() -> Any:
    from ingest.border.admission import Border
    from lakehouse.contract.pipeline import Source

    source = Source(
        topic="clicks",
        schema="id BIGINT, at STRING, who STRUCT<name: STRING>, n DOUBLE, tags ARRAY<STRING>",
        event_time="received_at",
        event_id="{id}:{at}",
        key="{who.name}",
        required=("id", "who.name"),
        max_event_bytes=1_000,
        name="clicks",
    )
    border = Border(source, tenant="acme", collector="n1")

    def admit(data: bytes) -> None:
        """Both ways to check an event agree."""
        [one], other = border.admit_all([data]), border.admit(data)
        assert (one.refusal, one.payload) == (other.refusal, other.payload)

    return admit, ()


def cloudevent() -> Any:
    from ingest.intake import NotACloudEvent, structured

    return structured, (NotACloudEvent,)


def event_stream() -> Any:
    from ingest.collectors.upstream import EventStreamParser, LineSplitter

    def parse(data: bytes) -> None:
        """The chunks of a stream do not matter."""
        whole, pieces = EventStreamParser(max_bytes=200), EventStreamParser(max_bytes=200)
        at = data[0] if data else 0
        assert whole.feed(data) == pieces.feed(data[:at]) + pieces.feed(data[at:])
        lines, parts = LineSplitter(200), LineSplitter(200)
        assert lines.feed(data) == parts.feed(data[:at]) + parts.feed(data[at:])

    return parse, ()


def kafka_headers() -> Any:
    from lakehouse.contract.envelope import HEADER_NAMES, Envelope, EnvelopeError

    names = sorted(HEADER_NAMES)

    def parse(data: bytes) -> None:
        Envelope.from_headers((names[i % len(names)], part) for i, part in enumerate(data.split(b"\n")))

    return parse, (EnvelopeError,)


def ack_token() -> Any:
    from ingest.answers.acks import Signer
    from ingest.errors import RequestRefused

    signer = Signer(b"k" * 32)
    return lambda data: signer.open(data.decode("latin-1")), (RequestRefused,)


def position() -> Any:
    from serve.core.position import Seal
    from serve.errors import RequestError

    seal = Seal(b"k" * 32)
    return lambda data: seal.parse(data.decode("latin-1")), (RequestError,)


def query() -> Any:
    from serve.core.position import Seal
    from serve.errors import RequestError
    from serve.push.request import query_of, subscription_of

    seal = Seal(b"k" * 32)
    return lambda data: subscription_of(query_of(data.decode("latin-1")), seal), (RequestError,)


def client_message() -> Any:
    import orjson

    from serve.core.position import Seal
    from serve.errors import RequestError
    from serve.push.request import subscription_of, texts_of

    seal = Seal(b"k" * 32)
    return lambda data: subscription_of(texts_of(orjson.loads(data)), seal), (RequestError, orjson.JSONDecodeError)


def _table() -> Any:
    import pyarrow as pa

    from serve.core.model import TableInfo

    schema = pa.schema({"k": pa.int64(), "city": pa.string(), "n": pa.float64(), "at": pa.timestamp("us", "UTC")})
    return TableInfo("x", "id", tuple(schema.names), ("k",), types=tuple(schema.types))


ROWS = [(1, "Köln", 2.5, None), (2**62, None, None, None), (-1, "%_", 1.7e308, None)]


def condition() -> Any:
    from lakehouse.contract.errors import FilterError
    from lakehouse.contract.sql.closures import Columns, compile_condition, pin_of
    from lakehouse.contract.sql.filters import parse_condition

    columns = Columns.of(_table())

    def parse(data: bytes) -> None:
        tree = parse_condition(data.decode("utf-8", "replace"), columns)
        if tree is not None:
            matches = compile_condition(tree, columns)
            pin_of(tree, columns)
            assert all(matches(row) in (True, False, None) for row in ROWS)

    return parse, (FilterError,)


def aggregate() -> Any:
    from lakehouse.contract.errors import FilterError
    from serve.core.aggregate import aggregate_view, rows_of_select
    from serve.core.view import rows_view

    table = _table()

    def parse(data: bytes) -> None:
        select = data.decode("utf-8", "replace")
        if rows := rows_of_select(select, table):
            rows_view(table, rows[1], rows[0], "")
        else:
            aggregate_view(table, select, "", "")

    return parse, (FilterError,)


def statement() -> Any:
    from lakehouse.contract.errors import MillraceError
    from serve.sql.statement import read_statement

    return lambda data: read_statement(data.decode("utf-8", "replace")), (MillraceError,)


def live_query() -> Any:
    from lakehouse.contract.errors import QueryRefused
    from lakehouse.contract.sql.ddl import parse_ddl
    from lakehouse.contract.sql.spark import check_spark_query

    columns = parse_ddl("id BIGINT, who STRING, place STRUCT<city: STRING>")
    return lambda data: check_spark_query(data.decode("utf-8", "replace"), "clicks", columns), (QueryRefused,)


def log_segment() -> Any:
    from ingest.log.segments import EVENTS, LogFrame, read_event, scan

    def parse(data: bytes) -> None:
        """Every byte is in a frame or in damage."""
        at = 8
        for found in scan(data):
            assert found.offset == at
            at = found.end
            if isinstance(found, LogFrame) and found.kind in EVENTS:
                read_event(found.body, source="clicks", collector="n1")
        assert at == max(len(data), 8)

    return parse, ()


def feed_file(kind: str) -> Any:
    from lakehouse.contract.pipeline import Source
    from lakehouse.errors import BadFile
    from lakehouse.load.files import OpenFile
    from lakehouse.load.readers import read
    from lakehouse.load.rows import FilePosition

    schema = "id BIGINT, price DOUBLE, ok BOOLEAN, at STRING"
    source = Source(topic="t", schema=schema, event_time="now()", name="things", max_event_bytes=1_000)

    def parse(data: bytes) -> None:
        for segment in read(OpenFile("f", io.BytesIO(data), kind), source, FilePosition("f")):
            assert all(type(payload) is bytes for payload in segment.payloads)

    return parse, (BadFile,)


CLOUDEVENT = b'{"specversion":"1.0","id":"a","source":"/s","type":"t","time":"2026-01-01T00:00:00Z","data":{"a":1}}'
HEAD = b"POST /v1/clicks HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 12\r\nX-API-Key: k"
PARSERS = {
    "http_head": Parser(http_head, (HEAD,)),
    "event": Parser(
        event, (b'{"id":1,"at":"noon","who":{"name":"a"},"n":1.5,"tags":["x"]}', b'{"id":1e5}', b"[" * 300)
    ),
    "cloudevent": Parser(cloudevent, (CLOUDEVENT, CLOUDEVENT.replace(b'"data":{"a":1}', b'"data_base64":"e30="'))),
    "event_stream": Parser(event_stream, (b"\xef\xbb\xbfid: 1\nevent: x\ndata: a\r\ndata: b\r\rretry: 10\n\n: c\n\n",)),
    "kafka_headers": Parser(kafka_headers, (b"n1\ne1\n00\n17\nclicks\nacme\n1\nno",)),
    "ack_token": Parser(ack_token, (b"AAAA-_", b"a" * 64)),
    "position": Parser(position, (b"AAAA-_", b"a" * 64)),
    "query": Parser(
        query, (b"table=x&where=n%3E1&columns=k,n&conflate=1&window=5", b"table=x&select=SELECT+1&from=AA")
    ),
    "client_message": Parser(client_message, (b'{"table":"x","where":"n > 1","columns":["k"],"window":3}',)),
    "condition": Parser(
        condition,
        (
            b"n > 1 AND city LIKE 'K%' ESCAPE '!' OR k IN (1, 2)",
            b"coalesce(lower(city), 'x') = 'y' AND at >= TIMESTAMP '2026-01-01'",
            b"k % 0 = 1 OR k / 0 > n OR NOT (city IS NOT DISTINCT FROM NULL)",
            b"extract(year FROM at) BETWEEN -1 AND 1e999",
        ),
    ),
    "aggregate": Parser(
        aggregate, (b"SELECT city, sum(n) AS n, count(*) AS c FROM x WHERE k > 1 GROUP BY city", b"SELECT k, n FROM x")
    ),
    "statement": Parser(statement, (b"WITH a AS (SELECT 1) SELECT * FROM a, x AT (VERSION => 3)", b"SHOW TABLES")),
    "live_query": Parser(
        live_query, (b"SELECT window.start, who, count(*) AS n FROM clicks GROUP BY window(at, '1 hour'), who",)
    ),
    "log_segment": Parser(log_segment, (b"MRLOG\0\0\1",)),
    "json_lines": Parser(lambda: feed_file("jsonl"), (b'{"id":1}\n{"id":2}\r\n\nnone', b"\x1f\x8b\x08")),
    "csv": Parser(lambda: feed_file("csv"), (b'id,price,ok,at\n1,2.5,true,"a ""b"""\n,,,\n1\n', b"\x1f\x8b\x08"), 0.02),
}


def fuzz(name: str, arguments: list[str]) -> None:
    """Run one parser in this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=["ingest", "lakehouse", "serve"], enable_loader_override=False):
        parse, declared = PARSERS[name].make()

    def one(data: bytes) -> None:
        with suppress(*declared):
            parse(data)

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def run(name: str, inputs: int, seed: int) -> dict[str, Any]:
    """Run one parser in a process of its own; what came of it."""
    corpus = FOLDER / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(PARSERS[name].seeds):
        (corpus / f"seed-{number}").write_bytes(content)
    options = {"runs": inputs, "seed": seed, "timeout": HANG_S, "max_len": LONGEST, "rss_limit_mb": 4_096}
    options |= {"artifact_prefix": f"{FOLDER}/{name}-", "print_final_stats": 1, "verbosity": 1}
    command = [sys.executable, "-m", "tests.fuzz", name, *(f"-{key}={value}" for key, value in options.items())]
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parents[1])}
    done = subprocess.run([*command, str(corpus)], capture_output=True, text=True, check=False, env=environment)
    said = done.stdout + done.stderr
    (FOLDER / f"{name}.log").write_text(said, encoding="utf-8")
    counted = re.search(r"stat::number_of_executed_units:\s*(\d+)", said)
    seconds = re.search(r"Done \d+ runs in (\d+) second", said)
    found: dict[str, Any] = {"inputs": int(counted[1]) if counted else 0, "seconds": int(seconds[1]) if seconds else 0}
    return found if done.returncode == 0 else {**found, "failed": said.strip().splitlines()[-12:]}


def main() -> int:
    if sys.argv[1:] and sys.argv[1] in PARSERS and any(word[:1] == "-" or "/" in word for word in sys.argv[2:]):
        fuzz(sys.argv[1], sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=INPUTS, help="of each parser")
    parser.add_argument("--seed", type=int, default=1, help="of what is made up")
    parser.add_argument("parsers", nargs="*", metavar="PARSER", help=", ".join(PARSERS))
    options = parser.parse_args()
    if unknown := set(options.parsers) - set(PARSERS):
        parser.error(f"no parser {', '.join(sorted(unknown))}; there are {', '.join(PARSERS)}")
    found = {}
    for name in options.parsers or PARSERS:
        found[name] = run(name, round(options.inputs * PARSERS[name].share), options.seed)
        sys.stderr.write(f"{name}: {json.dumps(found[name])}\n")
    failed = [name for name, one in found.items() if "failed" in one]
    sys.stdout.write(json.dumps({"parsers": found, "failed": failed}) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
