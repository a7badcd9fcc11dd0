"""A driver that rehearses the shipped pipeline and writes its classes' archive when it ends; for :mod:`jobs.prepare`.

``python -m lakehouse.recording ARCHIVE FOLDER``
"""

from __future__ import annotations

import sys
from pathlib import Path

from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.settings import conf_dir, load_settings
from lakehouse.rehearse import rehearse
from lakehouse.session import build_session


def main(archive: Path, folder: Path) -> int:
    """Returns the JVM's exit code, once it has ended."""
    from pyspark import SparkContext

    settings = load_settings({}, lake=folder / "lake")
    session = build_session(settings, "millrace prepare", record_classes=archive)
    rehearse(session, settings, load_pipeline(conf_dir() / "pipelines" / "meetup"))
    session.stop()
    gateway = SparkContext._gateway
    assert gateway is not None
    process = gateway.proc
    gateway.shutdown()
    process.stdin.close()  # its sign to end
    return int(process.wait())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
