from __future__ import annotations

from pathlib import Path

import pytest

from serve import deltalog
from serve.errors import TableGone, TableUnreadable

from .lakes import top_topics, topics, window


def test_a_product_commit_is_read(root: Path) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [3]), [window(0)])
    product.overwrite(topics(0, [4]), [window(0)])
    commit = deltalog.read_commit(product.folder, 2)
    assert (len(commit.added), len(commit.removed), commit.metadata) == (1, 1, None)
    assert commit.added[0].data_change
    assert commit.added[0].located(product.folder).is_file()
    assert commit.facts.through == {"rsvps/0": 20}
    assert commit.facts.events == 10
    assert (commit.facts.oldest_at, commit.facts.newest_at) == (1_767_225_600_002, 1_767_225_600_502)
    assert commit.facts.committed_at > 1_700_000_000_000
    assert deltalog.versions(product.folder) == [0, 1, 2]


def test_custom_properties_survive_in_the_metadata(root: Path) -> None:
    metadata = deltalog.read_commit(top_topics(root).folder, 0).metadata
    assert metadata is not None
    assert metadata["configuration"] == {"millrace.key": "window_start,rank"}


def test_a_compaction_says_that_no_data_changed(root: Path) -> None:
    product = top_topics(root)
    for number in range(3):
        product.append(topics(number, [1]))
    product.compact()
    commit = deltalog.read_commit(product.folder, 4)
    assert {file.data_change for file in commit.added} == {file.data_change for file in commit.removed} == {False}


def test_no_such_version(root: Path) -> None:
    with pytest.raises(TableGone, match="no version 9"):
        deltalog.read_commit(top_topics(root).folder, 9)
    assert deltalog.versions(root / "gold" / "nothing") == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"add":{"path":"a","partitionValues":{},"deletionVector":{"storageType":"u"}}}', "deletion vectors"),
        ('{"commitInfo":{"timestamp":1,"millrace.through":"not json"}}', "commitInfo of version 0"),
        ('{"commitInfo":{"timestamp":1,"millrace.events":"many"}}', "commitInfo of version 0"),
    ],
)
def test_what_is_not_read(tmp_path: Path, line: str, problem: str) -> None:
    (tmp_path / "_delta_log").mkdir()
    deltalog.commit_path(tmp_path, 0).write_text(line)
    with pytest.raises(TableUnreadable, match=problem):
        deltalog.read_commit(tmp_path, 0)


def test_paths_in_the_log_are_escaped(tmp_path: Path) -> None:
    assert deltalog.AddedFile("a=x%2520y/f.parquet", {}, True).located(tmp_path) == tmp_path / "a=x%20y" / "f.parquet"
    assert deltalog.AddedFile("file:///x%20y/f.parquet", {}, True).located(tmp_path) == Path("/x y/f.parquet")
