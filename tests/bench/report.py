"""Every figure that README and site state, measured by one command; ``make report ARGS="latency fanout"``.

Each part runs a benchmark of this folder, with its baseline in the same run, and takes figures from its last line.
``docs/reference/figures.json`` keeps every run of every part, so it is the history; ``docs/reference/figures.md`` is
written from the newest run of each, and ``dist/report`` gets a plot of each part's ratios over its runs and of what it
says of growth. One host's figures differ by a factor of two within an hour, the ratio of two figures of one run does
not: so a ratio that is worse than in the run before by more than 15 % fails. ``--check`` measures nothing and fails if
the page says something else than the newest runs. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.bench_latency import ROOT
from tests.bench.plot import plot_lines

FIGURES = ROOT / "docs" / "reference" / "figures.json"
PAGE = ROOT / "docs" / "reference" / "figures.md"
BEGIN, END = "<!-- figures: make report writes them -->\n", "<!-- end of figures -->\n"
WORSE = 1.15

Values = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A benchmark and what the page says of it.

    Attributes:
        what: was measured.
        says: the figures, with names of values in braces.
        command: shown on the page.
        run: module of this folder and its arguments.
        take: values from the benchmark's last line.
        ratios: values that are ratios of one run, and whether more of it is better.
        growth: rows of a plot from its last line: ``panel``, ``line``, ``value``, ``size``.
    """

    what: str
    says: str
    command: str
    run: Sequence[str]
    take: Callable[[Values], Values]
    ratios: Mapping[str, bool] = field(default_factory=dict)
    growth: Callable[[Values], list[Values]] = lambda _: []


def run_of(found: Values, **wanted: Any) -> Values:
    """The one of a benchmark's runs with these settings."""
    return next(one for one in found["runs"] if all(one[name] == value for name, value in wanted.items()))


def take_latency(found: Values) -> Values:
    ours, plain = found["latency_ms"], found["plain_spark"]["latency_ms"]
    values = {f"{p}_s": round(ours[p] / 1000, 2) for p in ("p50", "p99")}
    values |= {f"plain_{p}_s": round(plain[p] / 1000, 1) for p in ("p50", "p99")}
    return values | {"plain_to_millrace": found["plain_to_millrace"]["p50"], "first_s": found["first_result_s"]}


def take_fanout(found: Values) -> Values:
    values: Values = {f"floor_{p}": round(found["floor"][f"{p}_ms"]) for p in ("p50", "p99")}
    for name, wanted in {
        "ws": {"transport": "websocket", "processes": 1},
        "two": {"transport": "websocket", "processes": 2},
        "sse": {"transport": "sse", "processes": 1},
    }.items():
        one = run_of(found, subscribers=10_000, filters=1, stopped=0, **wanted)
        values |= {f"{name}_{p}": round(one[f"{p}_ms"]) for p in ("p50", "p99")}
    return values | {"to_floor": round(values["ws_p50"] / values["floor_p50"], 2)}


def take_lakehouse(found: Values) -> Values:
    names = ("sustained_events_s", "sustained_cpu_s_per_million", "catch_up_events_s", "plain_spark_events_s")
    values = {name: found[name] for name in (*names, "latency_growth")}
    return values | {"to_plain": round(found["catch_up_events_s"] / found["plain_spark_events_s"], 1)}


def take_sketches(found: Any) -> Values:
    rows = {row["sketch"]: row for row in found if row["of"].startswith("1e+09")}
    return {
        f"{name}_{lg_k}": rows[f"HLL, lg_k {lg_k}"][name] for lg_k in (11, 12) for name in ("bytes", "error", "bound")
    }


PARTS = {
    "latency": Part(
        "source's socket to subscriber's socket, 1,000 events/s",
        "p50 {p50_s} s, p99 {p99_s} s; first result after {first_s} s. A plain Spark job with MERGE, without collector "
        "and server: {plain_p50_s} and {plain_p99_s} s",
        "make bench",
        ("bench_latency",),
        take_latency,
        {"plain_to_millrace": True},
    ),
    "collect": Part(
        "HTTP collector, one process, durable before the answer",
        "{http_single_s:,} single events/s, {http_batch_s:,} in batches; the message log costs {hml_of_rbml:.0%} of "
        "what logging each event on receipt costs",
        "make bench-collect",
        ("bench_collect",),
        lambda found: {
            "http_single_s": found["http_single_s"],
            "http_batch_s": found["http_batch_s"],
            "hml_of_rbml": found["hml_overhead_of_rbml"],
        },
        {"hml_of_rbml": False},
    ),
    "publishers": Part(
        "10,000 idle and 1,000 busy WebSocket publishers",
        "{mb} MB; {events_s:,} events/s",
        "make bench-publishers",
        ("bench_publishers",),
        lambda found: {"mb": found["rss_mb"], "events_s": found["flat_out"]["events_s"]},
    ),
    "lakehouse": Part(
        "Kafka to bronze and three products, with dedupe",
        "{sustained_events_s:,} page views of 209 bytes a second ({sustained_cpu_s_per_million} s of CPU a million). "
        "Of a full topic {catch_up_events_s:,} a second; a plain Spark job with MERGE, one product and no dedupe: "
        "{plain_spark_events_s:,}. On a lake with 1,000 times as many rows an event takes {latency_growth} times as "
        "long",
        'make bench-lakehouse ARGS="--rate 74000"',
        ("bench_lakehouse", "--rate", "74000", "--steps", "fill", "catch-up", "plain", "sustained", "growth"),
        take_lakehouse,
        {"to_plain": True, "latency_growth": False},
        lambda found: [
            {"panel": "latency, ms, by rows in the lake", "line": "p50", "size": size, "value": value}
            for size, value in (
                (found["latency_full_rows"] // 1_000, found["latency_empty_ms"]),
                (found["latency_full_rows"], found["latency_full_ms"]),
            )
        ],
    ),
    "loader": Part(
        "batch loader into bronze",
        "{parquet:,} (Parquet), {csv:,} (CSV), {jsonl:,} (JSON lines) rows/s; {end_to_end:,} offers/s from files to "
        "the catalogue",
        "make bench-lakehouse ARGS='--steps loader end-to-end'",
        ("bench_loader", "--end-to-end"),
        lambda found: {
            "parquet": found["loader_parquet_rows_s"],
            "csv": found["loader_csv_rows_s"],
            "jsonl": found["loader_rows_s"],
            "end_to_end": found["offers_end_to_end_s"],
        },
    ),
    "fanout": Part(
        "10,000 subscribers, 1 KB twice a second",
        "WebSocket p50/p99 {ws_p50}/{ws_p99} ms (two processes {two_p50}/{two_p99}), SSE {sse_p50}/{sse_p99} ms; a "
        "bare broadcast there: {floor_p50}/{floor_p99} ms; 1,000 stopped readers cost nothing",
        "make bench-fanout",
        ("bench_fanout",),
        take_fanout,
        {"to_floor": False},
        lambda found: [
            {
                "panel": f"fan-out p50, ms, by {name}",
                "line": run["transport"],
                "size": run[name],
                "value": run["p50_ms"],
            }
            for name, other in (("subscribers", "filters"), ("filters", "subscribers"))
            for run in found["runs"]
            if run["stopped"] == 0 and run["processes"] == 1
        ],
    ),
    "lookup": Part(
        "look-ups by key, 1,000/s, of rows that hold a session of 50 actions",
        "p50 {p50_ms} ms, p99 {p99_ms} ms",
        "make bench-lookup",
        ("bench_lookup",),
        lambda found: {"p50_ms": found["p50_ms"], "p99_ms": found["p99_ms"]},
    ),
    "control": Part(
        "control plane, 1,000 tenants, 10,000 subscriptions",
        "a new subscription has its first snapshot after {snapshot_ms} ms; a revoked key is refused after {revoked_ms} "
        "ms, what it holds is closed within 1 s",
        "make bench-control",
        ("bench_control",),
        lambda found: {
            "snapshot_ms": round(found["first_snapshot_ms_p50"]),
            "revoked_ms": round(found["revoked_ms_p50"]),
        },
    ),
    "sketches": Part(
        "10^9 distinct items, merged from 100 sketches",
        "`lg_k` 11: {bytes_11:,} bytes, {error_11:.2%} off (standard error {bound_11:.2%}); `lg_k` 12: {bytes_12:,} "
        "bytes, {error_12:.2%} off ({bound_12:.2%})",
        "make bench-sketches ARGS=--full",
        ("bench_sketches", "--full"),
        take_sketches,
        growth=lambda found: [
            {
                "panel": f"error, %, {row['sketch']}",
                "line": row["of"],
                "size": row["bytes"],
                "value": row["error"] * 100,
            }
            for row in found
            if row["bound"] < 1
        ],
    ),
    "tail": Part(
        "a tail of a table in a server process",
        "{us_a_table_second:,} µs of CPU a second, and {ms_a_commit} ms a commit of 100 rows",
        "python -m tests.bench.bench_tail",
        ("bench_tail",),
        lambda found: {name: found[name] for name in ("us_a_table_second", "ms_a_commit")},
    ),
    "seen": Part(
        "index of seen events, a batch of 14,000",
        "{small} ms at a million entries, {large} ms at ten million; {bytes} bytes an entry on the disk",
        "python -m tests.bench.bench_seen 1000000 10000000",
        ("bench_seen", "1000000", "10000000"),
        lambda found: {
            "small": found["batch_ms"]["1000000"],
            "large": found["batch_ms"]["10000000"],
            "bytes": found["bytes_an_entry"],
            "growth": round(found["batch_ms"]["10000000"] / found["batch_ms"]["1000000"], 2),
        },
        {"growth": False},
        lambda found: [
            {"panel": "judging a batch, ms, by keys seen", "line": "batch", "size": int(size), "value": value}
            for size, value in found["batch_ms"].items()
        ],
    ),
}


def measure(name: str) -> Values:
    """The last line of a part's benchmark."""
    part = PARTS[name]
    command = [sys.executable, "-m", f"tests.bench.{part.run[0]}", *part.run[1:]]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {' '.join(command[2:])} ended with status {done.returncode}")
    found: Values = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def worse(part: Part, before: Values, now: Values) -> dict[str, float]:
    """By ratio: how many times as bad as in the run before, of those that are worse by too much."""
    found = {}
    for name, more_is_better in part.ratios.items():
        if before.get(name) and now.get(name):
            times = before[name] / now[name] if more_is_better else now[name] / before[name]
            if times > WORSE:
                found[name] = round(times, 2)
    return found


def table(history: Mapping[str, Sequence[Values]]) -> str:
    """The page's table."""
    lines = ["| what | figure | measured | command |", "|---|---|---|---|"]
    for name, part in PARTS.items():
        if history.get(name):
            newest = history[name][-1]
            said = newest.get("says") or part.says.format(**newest["values"])
            lines.append(f"| {part.what} | {said} | {newest['at']} | `{part.command}` |")
    return "\n".join(lines) + "\n"


def page(text: str, history: Mapping[str, Sequence[Values]]) -> str:
    """The page with the newest figures."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(history)}\n{END}{after}"


def plot(name: str, runs: Sequence[Values], last: Values, folder: Path) -> None:
    """A part's ratios over its runs, and its growth."""
    part = PARTS[name]
    rows = [
        {"panel": "ratios", "line": ratio, "run": number, "value": run["values"][ratio]}
        for number, run in enumerate(runs, 1)
        for ratio in part.ratios
        if ratio in run["values"]
    ]
    if rows:
        plot_lines(folder / f"{name}-ratios.svg", ["ratios"], rows, across="run")
    if growth := part.growth(last):
        plot_lines(
            folder / f"{name}-growth.svg", list(dict.fromkeys(row["panel"] for row in growth)), growth, across="size"
        )


def commit() -> str:
    """Of the working tree."""
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"which; all: {' '.join(PARTS)}")
    parser.add_argument("--check", action="store_true", help="compare the page with the newest runs")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    history: dict[str, list[Values]] = json.loads(FIGURES.read_text(encoding="utf-8"))
    said = PAGE.read_text(encoding="utf-8")
    if options.check:
        if said != page(said, history):
            raise SystemExit(
                f"{PAGE.relative_to(ROOT)} is not what make report wrote: run make report, or undo the change"
            )
        return 0
    folder = ROOT / "dist" / "report"
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Values] = {}
    bad: dict[str, dict[str, float]] = {}
    for name in options.parts or PARTS:
        last = measure(name)
        run = {"at": time.strftime("%Y-%m-%d"), "commit": commit(), "cores": os.cpu_count()}
        run["values"] = found[name] = PARTS[name].take(last)
        runs = history.setdefault(name, [])
        if runs and (regressed := worse(PARTS[name], runs[-1]["values"], run["values"])):
            bad[name] = regressed
        runs.append(run)
        (folder / f"{name}.json").write_text(json.dumps(last, indent=1), encoding="utf-8")
        plot(name, runs, last, folder)
        FIGURES.write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(said, history), encoding="utf-8")
        (folder / "report.md").write_text(f"# Figures\n\n{table(history)}", encoding="utf-8")
    sys.stdout.write(json.dumps({"figures": found, "worse": bad}) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
