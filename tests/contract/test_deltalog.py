"""The reader of the Delta log, on logs that delta-rs wrote."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from deltalake import DeltaTable

from lakehouse.contract.deltalog import AddedFile, DeltaLog, LogFollower, TableGone, TableUnreadable, kept_ms
from lakehouse.contract.lake import CommitFacts
from lakehouse.contract.storage import Stamp
from tests.serve.lakes import Product, top_topics, topics, window


@pytest.fixture
def product(tmp_path: Path) -> Product:
    return top_topics(tmp_path)


def test_a_product_commit(product: Product) -> None:
    product.overwrite(topics(0, [3]), [window(0)])
    product.overwrite(topics(0, [4]), [window(0)])
    log = DeltaLog(product.folder)
    commit = log.read(2)
    assert (len(commit.added), len(commit.removed), commit.metadata) == (1, 1, None)
    assert commit.added[0].data_change
    assert commit.added[0].located(product.folder).is_file()
    assert commit.info == log.info(2)
    facts = CommitFacts.of("top_topics", commit)
    assert (facts.through, facts.events) == ({"rsvps/0": 20}, 10)
    assert (facts.oldest_at, facts.newest_at) == (1_767_225_600_002, 1_767_225_600_502)
    assert facts.committed_at > 1_700_000_000_000


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("interval 6 hours", 6),
        ("INTERVAL 1 day 12 hours", 36),
        ("interval 2 weeks", 336),
        ("1 month", 168),
        ("", 168),
        (None, 168),
    ],
)
def test_retention_is_read_as_delta_writes_it(text: str | None, hours: int) -> None:
    configuration = {"delta.deletedFileRetentionDuration": text}
    assert kept_ms(configuration, "deletedFileRetentionDuration") == hours * 3_600_000


def test_versions_and_infos(product: Product) -> None:
    product.append(topics(0, [1]))
    product.append(topics(1, [1]))
    log = DeltaLog(product.folder)
    assert (log.versions(), log.oldest(), log.newest(), log.checkpoints()) == ([0, 1, 2], 0, 2, [])
    assert (log.has(2), log.has(3)) == (True, False)
    assert [version for version, _ in log.infos()] == [0, 1, 2]
    assert [info["operation"] for _, info in log.infos(newest_first=True)] == ["WRITE", "WRITE", "CREATE TABLE"]
    assert json.loads(log.newest_info("millrace.through")) == {"rsvps/0": 20}
    assert log.newest_info("absent") is None
    written = log.commit_file(2).stat()
    assert log.written_at(2) == pytest.approx(written.st_mtime)
    assert log.stamp(2) == Stamp(str(written.st_ino), written.st_mtime_ns)
    assert log.stamp(3) is log.written_at(3) is None


def test_properties_also_when_only_the_checkpoint_has_them(product: Product) -> None:
    wanted = {"millrace.key": "window_start,rank"}
    product.append(topics(0, [1]))
    log = DeltaLog(product.folder)
    assert log.properties() == wanted
    DeltaTable(product.folder).create_checkpoint()
    log.commit_file(0).unlink()
    assert (log.checkpoints(), log.oldest()) == ([1], 1)
    assert log.properties() == wanted


def test_compaction_changes_no_data(product: Product) -> None:
    for number in range(3):
        product.append(topics(number, [1]))
    product.compact()
    commit = DeltaLog(product.folder).read(4)
    assert {file.data_change for file in commit.added} == {file.data_change for file in commit.removed} == {False}


def test_a_missing_version_and_a_missing_table(product: Product, tmp_path: Path) -> None:
    with pytest.raises(TableGone, match="no version 9"):
        DeltaLog(product.folder).read(9)
    none = DeltaLog(tmp_path / "gold" / "nothing")
    assert (none.exists(), none.versions(), none.newest(), none.oldest(), list(none.infos())) == (False, [], -1, -1, [])
    with pytest.raises(TableGone, match="there is no table"):
        none.properties()


def test_deletion_vectors_are_refused(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path)
    log.folder.mkdir()
    log.commit_file(0).write_text('{"add":{"path":"a","partitionValues":{},"deletionVector":{"storageType":"u"}}}')
    with pytest.raises(TableUnreadable, match="deletion vectors"):
        log.read(0)


@pytest.mark.parametrize("key", ["millrace.through", "millrace.events", "timestamp"])
def test_malformed_facts_are_refused(tmp_path: Path, key: str) -> None:
    log = DeltaLog(tmp_path)
    log.folder.mkdir()
    log.commit_file(0).write_text(json.dumps({"commitInfo": {key: "not a value"}}))
    with pytest.raises(TableUnreadable, match="commitInfo of version 0"):
        CommitFacts.of("t", log.read(0))


def test_paths_in_the_log_are_escaped(tmp_path: Path) -> None:
    assert AddedFile("a=x%2520y/f.parquet", {}, True).located(tmp_path) == tmp_path / "a=x%20y" / "f.parquet"
    assert AddedFile("file:///x%20y/f.parquet", {}, True).located(tmp_path) == Path("/x y/f.parquet")


def test_a_follower_tells_a_replaced_table_and_a_cleaned_log(product: Product, tmp_path: Path) -> None:
    follower = LogFollower(product.folder)
    assert not LogFollower(tmp_path / "nothing").open()
    assert follower.open()
    product.append(topics(0, [1]))
    assert len(follower.read(1).added) == 1
    with pytest.raises(TableGone, match="no version 2"):
        follower.read(2)
    follower.check_gap(2)
    for _ in range(3):
        product.append(topics(0, [1]))
    follower.log.commit_file(2).unlink()
    with pytest.raises(TableGone, match="goes on at 4 without version 2"):
        follower.check_gap(2)

    shutil.rmtree(product.folder)
    with pytest.raises(TableGone, match="dropped"):
        follower.check()
    top_topics(tmp_path)
    with pytest.raises(TableGone, match="replaced"):
        follower.read(0)
    held = len(os.listdir("/proc/self/fd"))
    follower.close()
    assert len(os.listdir("/proc/self/fd")) == held - 1


def test_a_table_whose_protocol_asks_for_more_is_not_appended_to(product: Product) -> None:
    assert DeltaLog(product.folder).opened_to_append().version() == 0
    DeltaTable(product.folder).alter.add_constraint({"some": "rank > 0"})
    with pytest.raises(TableUnreadable, match="writers of version 3"):
        DeltaLog(product.folder).opened_to_append()
