"""Kafka records as bronze rows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import Row, SparkSession

from lakehouse.bronze.query import BronzeWriter, check_topic, is_outdated, starting_offsets, to_bronze, without_known
from lakehouse.bronze.table import COLUMNS, BronzeClock, Progress, create, progress
from lakehouse.contract.deltalog import DeltaLog
from lakehouse.contract.envelope import Envelope, fingerprint
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Source
from lakehouse.errors import TopicReplaced
from tests.lakehouse.lakes import Site, bronze_rows, eventually, mixture

NOW = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
KAFKA = (
    "key BINARY, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, topic STRING, partition INT, "
    "offset BIGINT, timestamp TIMESTAMP"
)
FULL = Envelope("e1", "clicks", "acme", 1_700_000_000_123_456, "n1", fingerprint(b"x"), suspect=True, reject="bad")


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ({}, "earliest"),
        ({"t/0": 5, "t/1": 7}, {"0": 5, "1": 7}),
        ({"t/1": 7}, {"0": -2, "1": 7}),
        ({"t/0": 5, "t/3": 2}, {"0": 5, "1": -2}),  # the topic was made again, with fewer
        ({"other/0": 5}, {"0": -2, "1": -2}),
        ({"t/0": 5, "a/t/1": 9}, {"0": 5, "1": -2}),
    ],
)
def test_starting_offsets(offsets: Mapping[str, int], expected: str | dict[str, int]) -> None:
    found = starting_offsets("t", 2, offsets)
    assert found == expected if isinstance(expected, str) else json.loads(found) == {"t": expected}


@pytest.mark.parametrize(
    ("planned", "taken", "outdated"),
    [
        ({"t": {"0": 5, "1": 7}}, {"t/0": 5, "t/1": 7}, False),
        ({"t": {"0": 5, "1": 7}}, {"t/0": 5}, False),  # a batch that was begun
        ({"t": {"0": 5, "1": 7}}, {"t/0": 5, "t/1": 8}, True),  # another machine has gone on
        ({"other": {"0": 5}}, {"t/0": 1}, True),
        ({}, {"t/0": 1}, False),
    ],
)
def test_a_checkpoint_that_others_have_gone_beyond(
    tmp_path: Path, planned: dict[str, dict[str, int]], taken: Mapping[str, int], outdated: bool
) -> None:
    assert not is_outdated(tmp_path, "t", taken)
    (tmp_path / "offsets").mkdir()
    for number, content in enumerate(({"t": {"0": 0}}, planned)):
        (tmp_path / "offsets" / str(number)).write_text(f"v1\n{{}}\n{json.dumps(content)}")
    assert is_outdated(tmp_path, "t", taken) == outdated


@pytest.mark.parametrize(
    ("topic", "topic_id", "ends", "done", "detail"),
    [
        ("t", "A", {"t/0": 5}, Progress(), ""),
        ("t", "A", {"t/0": 5}, Progress({"t/0": 5}), ""),  # a table from before ids were noted
        ("t", "A", {"t/0": 9, "t/1": 1}, Progress({"t/0": 5}, topics={"t": "A"}), ""),
        ("u", "B", {"u/0": 0}, Progress({"t/0": 5}, topics={"t": "A"}), ""),
        ("t", "B", {"t/0": 9}, Progress({"t/0": 5}, topics={"t": "A"}), "its id was A and is B"),
        ("t", "A", {"t/0": 4}, Progress({"t/0": 5}, topics={"t": "A"}), "t/0 ends at offset 4"),
        ("t", "A", {"t/0": 5}, Progress({"t/0": 5, "t/1": 1}), "t/1 ends at offset 0"),
    ],
)
def test_offsets_of_another_topic_of_the_name(
    topic: str, topic_id: str, ends: Mapping[str, int], done: Progress, detail: str
) -> None:
    source = Source(topic=topic, schema="id BIGINT", event_time="received_at", name="clicks")
    if not detail:
        check_topic(source, topic_id, ends, done)
        return
    with pytest.raises(TopicReplaced, match=detail):
        check_topic(source, topic_id, ends, done)


def rows(spark: SparkSession, *headers: list[tuple[str, bytes]] | None, value: bytes | None = b"x") -> list[Row]:
    records = [
        (b"k", bytearray(value) if value is not None else None, found, "t", 1, number, NOW)
        for number, found in enumerate(headers)
    ]
    return (
        to_bronze(spark.createDataFrame(records, KAFKA), source="clicks", tenant="default").orderBy("offset").collect()
    )  # type: ignore[arg-type]


@pytest.mark.spark
def test_an_envelope_becomes_columns(spark: SparkSession) -> None:
    (row,) = rows(spark, [*FULL.to_headers(), ("trace", b"\xff")])
    assert (row.event_id, row.source, row.tenant, row.collector) == ("e1", "clicks", "acme", "n1")
    assert row.received_at.timestamp() == 1_700_000_000.123456
    assert (row.fingerprint, row.suspect, row.reject) == (FULL.fingerprint, True, "bad")
    assert (bytes(row.key), bytes(row.payload), row.origin) == (b"k", b"x", "stream")
    assert (row.topic, row.partition, row.offset, row.broker_time.timestamp()) == ("t", 1, 0, NOW.timestamp())
    assert {name: bytes(value) for name, value in row.headers.items()} == {"trace": b"\xff"}


@pytest.mark.spark
def test_records_of_another_producer(spark: SparkSession) -> None:
    found = rows(spark, None, [], [("trace", b"1")])
    for offset, row in enumerate(found):
        assert (row.event_id, row.source, row.tenant) == (f"@t/1/{offset}", "clicks", "default")
        assert (row.collector, row.suspect, row.reject) == ("@broker", False, None)
        assert row.received_at.timestamp() == NOW.timestamp()
        assert row.fingerprint == "md5:9dd4e461268c8034f5c8564e155c67a6"


@pytest.mark.spark
def test_headers_that_are_sent_twice_or_are_odd(spark: SparkSession) -> None:
    twice = [*FULL.to_headers(), ("id", b"e2"), ("trace", b"1"), ("trace", b"2")]
    far = [("received_at", b"9000000000000000000")]
    found = rows(spark, twice, [("received_at", b"soon")], far, [("id", None)])  # type: ignore[list-item]
    assert found[0].event_id == "e2"
    assert bytes(found[0].headers["trace"]) == b"2"
    assert [row.received_at.timestamp() for row in found[1:3]] == [NOW.timestamp()] * 2
    assert found[3].event_id == "@t/1/3"


@pytest.mark.spark
def test_headers_in_their_usual_order_mean_what_they_mean_in_any_other(spark: SparkSession) -> None:
    plain = Envelope("e1", "views", "acme", 1_700_000_000_123_456, "n1", fingerprint(b"x")).to_headers()
    nameless = [(name, None if name == "id" else value) for name, value in plain]
    for headers in (plain, nameless, [*plain[:5], ("fingerprin", b"f")], [*plain[:5], ("id", b"e2")], plain[:5]):
        found = rows(spark, headers, headers[::-1] if headers[-1] != ("id", b"e2") else None)  # type: ignore[arg-type]
        usual, turned = (row.asDict() | {"offset": 0} for row in found)
        if turned["collector"] == "n1":
            assert usual["event_id"] == ("@t/1/0" if headers is nameless else "e1")
            assert turned | {"event_id": usual["event_id"]} == usual
            assert turned["event_id"] in (usual["event_id"], "@t/1/1")
        else:
            assert usual["event_id"] == "e2", "the later of two"


@pytest.mark.spark
def test_a_record_without_a_value(spark: SparkSession) -> None:
    (row,) = rows(spark, FULL.to_headers(), value=None)
    assert (row.event_id, row.payload) == ("e1", None)


@pytest.mark.spark
def test_the_weight_of_an_event_is_1_unless_its_header_says_a_sane_number(spark: SparkSession) -> None:
    texts = [b"10.0", b"1", b"0.5", b"-3", b"NaN", b"Infinity", b"1e300", b"many", b""]
    found = rows(spark, [], *[[("weight", text)] for text in texts])
    assert [row.weight for row in found] == [1.0, 10.0, *[1.0] * 8]
    assert found[1].headers == {}


@pytest.mark.spark
def test_rows_have_the_columns_of_the_table(spark: SparkSession) -> None:
    frame = to_bronze(spark.createDataFrame([], KAFKA), source="clicks", tenant="default")
    assert [*frame.columns, "bronze_at", "date"] == COLUMNS.names


@pytest.mark.spark
def test_rows_that_bronze_has_already(spark: SparkSession) -> None:
    places = [("t", 0, 4), ("t", 0, 5), ("t", 1, 0), ("t", 2, 0), ("u", 0, 0)]
    frame = spark.createDataFrame(places, "topic STRING, partition INT, offset BIGINT")
    left = without_known(frame, {"t/0": 5, "t/1": 1}).collect()
    assert [tuple(row) for row in left] == [("t", 0, 5), ("t", 2, 0), ("u", 0, 0)]
    assert without_known(frame, {}).count() == len(places)


class Batches:
    """Micro-batches of one topic, each appended by the driver or by Spark."""

    def __init__(self, spark: SparkSession, folder: Path, *, small: bool) -> None:
        self._spark = spark
        self._small = small
        self._lake = Lake(folder / "lake")
        self.table = self._lake.bronze("clicks")
        create(self.table)

    def writer(self, now: Callable[[], float] = time.time) -> BronzeWriter:
        return BronzeWriter(self.table, progress(self.table), BronzeClock(self._lake, self.table, now))

    def run(self, writer: BronzeWriter, start: dict[int, int], end: dict[int, int]) -> None:
        """Give the writer the records from ``start`` to ``end``."""
        ends = {f"t/{partition}": offset for partition, offset in end.items()}
        records = [
            (None, b"x", None, "t", partition, offset, NOW)
            for partition, until in end.items()
            for offset in range(start.get(partition, 0), until)
        ]
        rows = to_bronze(self._spark.createDataFrame(records, KAFKA), source="clicks", tenant="default")  # type: ignore[arg-type]
        if not writer.events_of(ends):
            return
        if self._small:
            found = rows.toArrow()
            version, whole = writer.append(found.filter(writer.unknown(found)), ends)
            assert whole.schema == COLUMNS
        else:
            version, bronze_at = writer.append_frame(writer.without_known(rows), ends)
            assert bronze_at == progress(self.table).bronze_at
        assert version == DeltaTable(str(self.table.path)).version()

    def held(self) -> list[tuple[int, int]]:
        found = DeltaTable(str(self.table.path)).to_pyarrow_table(columns=["partition", "offset"])
        return sorted((row["partition"], row["offset"]) for row in found.to_pylist())


@pytest.fixture(params=[True, False], ids=["small", "long"])
def batches(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Batches:
    return Batches(spark, tmp_path, small=request.param)


@pytest.mark.spark
def test_batches_that_come_again_are_dropped_in_whole_or_in_part(batches: Batches) -> None:
    first = batches.writer()
    batches.run(first, {}, {0: 3, 1: 2})
    batches.run(first, {0: 3, 1: 2}, {0: 4, 1: 2})
    version = DeltaTable(str(batches.table.path)).version()

    again = batches.writer()  # after a crash before Spark noted the batch
    batches.run(again, {0: 3, 1: 2}, {0: 4, 1: 2})
    assert DeltaTable(str(batches.table.path)).version() == version
    batches.run(again, {0: 4, 1: 2}, {0: 5, 1: 3})

    other = batches.writer()  # with an older checkpoint: the second partition catches up more slowly
    batches.run(other, {}, {0: 2, 1: 1})
    batches.run(other, {0: 2, 1: 1}, {0: 7, 1: 2})
    batches.run(other, {0: 7, 1: 2}, {0: 8, 1: 4})
    assert batches.held() == [(0, offset) for offset in range(8)] + [(1, offset) for offset in range(4)]
    assert progress(batches.table).offsets == {"t/0": 8, "t/1": 4}


@pytest.mark.spark
def test_offsets_that_go_back_end_the_query(batches: Batches) -> None:
    writer = batches.writer()
    batches.run(writer, {}, {0: 3, 1: 2})
    batches.run(writer, {0: 3, 1: 2}, {0: 3, 1: 4})
    with pytest.raises(TopicReplaced, match="t/1 ended at offset 4, and now at 1"):
        batches.run(writer, {0: 3}, {0: 4, 1: 1})
    assert progress(batches.table).offsets == {"t/0": 3, "t/1": 4}


@pytest.mark.spark
def test_the_time_of_a_commit_never_goes_back(batches: Batches) -> None:
    clock = iter([1000.0, 999.0, 999.5])
    for number in range(3):
        batches.run(batches.writer(lambda: next(clock)), {0: number}, {0: number + 1})
    times = DeltaTable(str(batches.table.path)).to_pyarrow_table(columns=["offset", "bronze_at"]).sort_by("offset")
    assert [value.timestamp() for value in times["bronze_at"].to_pylist()] == [1000.0, 1000.000001, 1000.000002]
    assert progress(batches.table) == Progress({"t/0": 3}, 1_000_000_002)


@pytest.mark.spark
def test_a_writer_goes_on_after_others_commits_whose_log_was_cleaned_up(batches: Batches) -> None:
    writer = batches.writer()
    batches.run(writer, {}, {0: 3})
    for number in (10, 20, 30):  # by a loader, while no event comes for hours
        rows = bronze_rows([b"x"], partition=[number], offset=[0], origin=["batch"])
        write_deltalake(str(batches.table.path), rows, mode="append")
    delta, log = DeltaTable(str(batches.table.path)), DeltaLog(batches.table.path)
    delta.create_checkpoint()
    for version in range(delta.version()):
        log.commit_file(version).unlink()
    batches.run(writer, {0: 3}, {0: 5})
    assert batches.held() == [(0, offset) for offset in range(5)] + [(10, 0), (20, 0), (30, 0)]


@pytest.mark.spark
def test_text_of_headers_is_valid_or_not_taken(spark: SparkSession) -> None:
    (row,) = rows(spark, [(name, b"\xff" if name == "id" else value) for name, value in FULL.to_headers()])
    assert (row.event_id, row.collector) == ("@t/1/0", "n1")


@pytest.mark.spark
@pytest.mark.broker
def test_bronze_alone_takes_everything_as_it_came(new_site: Callable[[], Site], spark: SparkSession) -> None:
    from lakehouse.stages import Stages

    place = new_site()
    place.send(mixture(0, 40))
    table = place.lake.bronze("clicks")
    with place.running(spark, Stages(layers=())) as alive:
        eventually(lambda: sum(progress(table).offsets.values()) == len(place.records), alive=alive)
    payloads = DeltaTable(str(table.path)).to_pyarrow_table(columns=["payload"])["payload"].to_pylist()
    assert sorted(payloads, key=str) == sorted((record.payload for record in place.records), key=str)
    assert [ref.name for ref in place.lake.tables()] == ["clicks"]
