"""Events that a person let pass although they fail an expectation whose action is ``halt``.

``LAKE/_millrace/accepted/SOURCE.json`` holds their ids. Where it is lost the query halts at the same event again and
asks again: nothing is counted by mistake.
"""

from __future__ import annotations

import json
from pathlib import Path

from lakehouse.contract.lake import Lake
from lakehouse.errors import QualityProblem


def accepted(lake: Lake, source: str) -> frozenset[str]:
    """Ids of the accepted events of a source.

    Raises:
        QualityProblem: the file is damaged.
    """
    path = _file(lake, source)
    try:
        return frozenset(str(name) for name in json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return frozenset()
    except (ValueError, TypeError):
        raise QualityProblem(source, f"{path} is damaged", "Remove it; accept again what the query asks for") from None


def accept(lake: Lake, source: str, event: str) -> None:
    """Let an event count; for the query it holds from its next start."""
    path = _file(lake, source)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(sorted({*accepted(lake, source), event})), encoding="utf-8")
    fresh.replace(path)


def _file(lake: Lake, source: str) -> Path:
    return lake.state / "accepted" / f"{source}.json"
