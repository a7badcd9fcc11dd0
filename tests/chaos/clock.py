"""A wall clock that can be moved under the processes that run by it, as a step of NTP does: :file:`clock.c`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path


class WallClock:
    """Of one machine: of all processes that are started with its environment.

    Attributes:
        environment: theirs; it loads the compiled ``clock.c``.
        missing: why the clock cannot be moved here; empty if it can.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._offset, library = folder / "offset", folder / "clock.so"
        self._offset.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "MOVED_CLOCK": str(self._offset)}
        self.missing = ""
        source = Path(__file__).with_suffix(".c")
        try:
            subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            self.missing = f"clock.c cannot be compiled here: {error}"
            self.environment = {}
            return
        self.move(-3_600)
        clock = [sys.executable, "-c", "import time; print(time.time())"]
        shown = subprocess.run(clock, env=self.environment, check=True, capture_output=True).stdout
        self.move(0)
        if abs(float(shown) + 3_600 - time.time()) > 60:
            self.missing = "LD_PRELOAD has no effect here"

    def move(self, seconds: float) -> None:
        """Let the clock be so much ahead of the right time, or behind it, from now on."""
        with self._offset.open("r+b", buffering=0) as file:
            file.write(int(seconds * 1e9).to_bytes(8, sys.byteorder, signed=True))
