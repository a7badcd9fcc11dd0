"""What a round of chaos found, as text and as a page."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.agent import Harm
from tests.chaos.rig import Senders
from tests.chaos.subscribers import Hook, Mirror
from tests.chaos.verdict import Verdict

PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body{{font:15px/1.5 system-ui;max-width:70rem;margin:2rem auto;padding:0 1rem}}
table{{border-collapse:collapse}}td,th{{padding:.1rem .8rem;text-align:left;border-bottom:1px solid #ddd}}
rect{{fill:#c44}}text{{font:12px system-ui}}.bad{{color:#b00}}</style>
<h1>{title}</h1><p class="{mood}">{outcome}</p>{body}"""


@dataclass
class Round:
    """One round.

    Attributes:
        starts: of the supervisor.
        settled_s: from the end of harm until everything had arrived.
        figures: what passed, by name.
    """

    seed: int
    minutes: float
    harms: Sequence[Harm]
    left_out: Sequence[str]
    verdict: Verdict
    settled_s: float
    starts: int
    figures: dict[str, Any] = field(default_factory=dict)

    def count(self, senders: Senders, mirrors: Sequence[Mirror], hooks: Sequence[Hook]) -> None:
        """Take figures over."""
        self.figures = {
            "acknowledged": len(set(senders.acknowledged)),
            **{f"acknowledged ({way})": count for way, count in senders.by_way.items()},
            "refused for a while": senders.refused,
            **{name.replace("_", " "): count for name, count in self.verdict.counts.items()},
            **{f"messages ({mirror.name})": dict(mirror.seen) for mirror in mirrors},
            **{f"calls ({number})": dict(hook.calls) for number, hook in enumerate(hooks, 1)},
            "starts of the supervisor": self.starts,
            "settled after": f"{self.settled_s:.0f} s",
        }

    def summary(self) -> dict[str, Any]:
        """The last line."""
        found = {"seed": self.seed, "rounds": len(self.harms)}
        found |= {name: getattr(self.verdict, name) for name in ("lost", "twice", "out_of_order", "leaks")}
        return found | {"events": self.verdict.counts.get("events", 0), "settled_s": round(self.settled_s)}


def write_report(found: Round, folder: Path) -> None:
    """Write ``seed-N.txt`` and ``seed-N.html``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"seed-{found.seed}.txt").write_text(_text(found), encoding="utf-8")
    (folder / f"seed-{found.seed}.html").write_text(_page(found), encoding="utf-8")


def _outcome(found: Round) -> str:
    return (
        "; ".join(found.verdict.findings) or "Nothing lost, nothing counted twice, nothing out of order, nothing left."
    )


def _text(found: Round) -> str:
    lines = [f"Seed {found.seed}, {found.minutes:g} minutes, {len(found.harms)} harms", _outcome(found), ""]
    lines += [f"left out: {reason}" for reason in found.left_out]
    lines += [f"{name}: {value}" for name, value in found.figures.items()]
    lines += ["", *(f"{h.at:7.1f} s  {h.kind:<16} {h.seconds:5.1f} s  {h.target}" for h in found.harms)]
    return "\n".join(lines) + "\n"


def _page(found: Round) -> str:
    figures = "".join(
        f"<tr><td>{html.escape(name)}<td>{html.escape(str(value))}" for name, value in found.figures.items()
    )
    harms = "".join(
        f"<tr><td>{h.at}<td>{h.seconds}<td>{h.kind.replace('_', ' ')}<td>{html.escape(h.target)}" for h in found.harms
    )
    title = f"Chaos, seed {found.seed}: {found.minutes:g} minutes, {len(found.harms)} harms"
    body = f"<h2>When</h2>{_timeline(found)}<h2>What passed</h2><table>{figures}</table>"
    body += "".join(f"<p>Left out: {html.escape(reason)}" for reason in found.left_out)
    body += f"<h2>What was done</h2><table><tr><th>at, s<th>for, s<th>what<th>to whom{harms}</table>"
    mood = "bad" if found.verdict.findings else "good"
    return PAGE.format(title=title, outcome=html.escape(_outcome(found)), mood=mood, body=body)


def _timeline(found: Round) -> str:
    """One row for each kind of harm."""
    kinds = [kind for kind, _ in Counter(harm.kind for harm in found.harms).most_common()]
    scale = 800 / max(found.minutes * 60, *(harm.at + harm.seconds for harm in found.harms), 1)
    marks = [f'<text x="0" y="{18 * row + 13}">{kind}</text>' for row, kind in enumerate(kinds)]
    marks += [
        f'<rect x="{130 + harm.at * scale:.1f}" y="{18 * kinds.index(harm.kind) + 3}" '
        f'width="{max(harm.seconds * scale, 2):.1f}" height="12"/>'
        for harm in found.harms
    ]
    return f'<svg width="960" height="{18 * len(kinds)}">{"".join(marks)}</svg>'
