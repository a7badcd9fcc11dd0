"""``make test``: the tests in two pytest processes side by side, those with a Spark session of their own in the first.

Both wait a good deal (for a batch, a broker, a driver that starts), so two cores do both in little more than the time
of one. Arguments go to both; where they name tests, one process is enough. The second's output follows the first's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

FIRST = ["tests/lakehouse", "tests/contract", "tests/jobs"]
HALVES = {"lakehouse-contract-jobs": FIRST, "all-others": ["tests", *(f"--ignore={folder}" for folder in FIRST)]}
NOTHING_SELECTED = 5


def pytest(*arguments: str) -> list[str]:
    """The command."""
    return [sys.executable, "-m", "pytest", *arguments]


def follow(process: subprocess.Popen[bytes], output: BinaryIO) -> int:
    """Pass on what the process writes until it has ended; its exit status."""
    status = None
    while status is None:
        status = process.poll()
        sys.stdout.buffer.write(output.read())
        sys.stdout.buffer.flush()
        time.sleep(0.1)
    return status


def side_by_side(arguments: list[str], folder: Path) -> int:
    """Run both; 0 when both are well and had at least one test between them."""
    running = {}
    for name, tests in HALVES.items():
        own = ["-o", f"cache_dir=.pytest_cache/{name}", *tests, *arguments]
        with (folder / name).open("wb") as output:
            running[name] = subprocess.Popen(pytest(*own), stdout=output, stderr=subprocess.STDOUT)
    statuses, said = [], []
    try:
        for name, process in running.items():
            print(f"\n== {name} ==", flush=True)
            with (folder / name).open("rb") as output:
                statuses.append(follow(process, output))
            said.append((folder / name).read_text(errors="replace").splitlines())
    finally:
        for process in running.values():  # Ctrl-C reaches all three; wait until they have tidied up
            process.wait()
    print("\n== in all ==")
    for lines in said:
        print(*(line for line in lines if line.startswith(("FAILED ", "ERROR "))), *lines[-1:], sep="\n")
    bad = [status for status in statuses if status not in (0, NOTHING_SELECTED)]
    return bad[0] if bad else min(statuses)


def main(arguments: list[str]) -> int:
    """Run the tests."""
    if any(Path(word.partition("::")[0]).exists() for word in arguments):
        return subprocess.run(pytest(*arguments), check=False).returncode
    with tempfile.TemporaryDirectory() as folder:
        return side_by_side(arguments, Path(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
