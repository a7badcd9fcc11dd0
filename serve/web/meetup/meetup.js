/** The page: two subscriptions, drawn. Everything that comes from a table is set as text, never as markup. */

import { Chart } from "../charts.js";
import { subscribe } from "../client/millrace.js";
import { $, access, announce, server, showState } from "../page.js";
import { RankedList } from "../ranked.js";
import { Latency, medianOfLast, niceCeiling, Throughput } from "./meters.js";

const MINUTE = 60_000;
const KEEP_WINDOWS = 45;
const SPARK_WINDOWS = 30;
const LEADERS = 5;
const SPAN_MS = 120_000;
const TICK_MS = 250;
const BREAK_MS = 6000;
const SERIES = "millrace.series"; // the lines of the last two minutes, for a reload of this tab

const root = document.documentElement;
const whole = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat(undefined, { maximumSignificantDigits: 3 });
const compact = new Intl.NumberFormat(undefined, { notation: "compact", maximumSignificantDigits: 3 });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

const list = new RankedList($("top"), 10);
const charts = {};
for (const name of ["members", "throughput", "latency"]) charts[name] = new Chart($(`${name}-chart`), { plain: true });
const saved = savedSeries();
const rates = {
  members: new Throughput(SPAN_MS / 1000 + 10, saved.members),
  top_topics: new Throughput(SPAN_MS / 1000 + 10, saved.top_topics),
};
const latency = new Latency(SPAN_MS / 1000 + 10, saved.latency);

const options = { onState: drawState, prune, access, waitForTable: true };
const subscriptions = [];
const topics = subscribe(server, "top_topics", { ...options, onChange: onTopics });
const members = subscribe(server, "members", { ...options, onChange: onMembers });
subscriptions.push(topics, members);

let topicWindows = new Map(); // window start, ms -> rows in order of rank
let memberWindows = new Map(); // window start, ms -> row
let memberAnimation = 0;
let announcedWindow = null;

$("copy").addEventListener("click", copyPosition);
addEventListener("pagehide", saveSeries);
setInterval(tick, TICK_MS);
tick();

// ---- what comes

function onTopics(change) {
  measure("top_topics", change);
  if (change.newestAt !== undefined && !change.missed) {
    latency.add(change.receivedAt, change.oldestAt, change.newestAt);
  }
  topicWindows = new Map();
  for (const row of change.rows.values()) {
    const start = windowStart(row);
    if (!topicWindows.has(start)) topicWindows.set(start, []);
    topicWindows.get(start).push(row);
  }
  for (const rows of topicWindows.values()) rows.sort((a, b) => a.rank - b.rank);
  drawTopics();
  drawLeaders();
}

function onMembers(change) {
  measure("members", change);
  memberWindows = new Map([...change.rows.values()].map((row) => [windowStart(row), row]));
  drawMembers();
}

function measure(table, change) {
  if (change.events !== undefined) rates[table].add(change.committedAt, change.events);
  drawFooter();
}

function windowStart(row) {
  return Date.parse(row.window_start);
}

/** Keep the newest windows only: a snapshot may bring hours of them. */
function prune(rows) {
  const starts = [...new Set([...rows.values()].map(windowStart))].sort((a, b) => b - a);
  if (starts.length <= KEEP_WINDOWS) return [];
  const oldest = starts[KEEP_WINDOWS - 1];
  return [...rows].filter(([, row]) => windowStart(row) < oldest).map(([key]) => key);
}

// ---- what is seen

function drawTopics() {
  const newest = newestOf(topicWindows);
  list.show(topicWindows.get(newest) ?? [], topicWindows.get(newest - MINUTE) ?? []);
}

function drawLeaders() {
  const newest = newestOf(topicWindows);
  const starts = [...topicWindows.keys()].filter((start) => start !== newest).sort((a, b) => b - a);
  const rows = starts.slice(0, LEADERS).map((start) => {
    const [leader] = topicWindows.get(start);
    const [time, name, count] = ["time", "bdi", "span"].map((tag) => document.createElement(tag));
    time.dateTime = leader.window_start;
    time.textContent = clock.format(start);
    name.dir = "auto";
    name.title = name.textContent = leader.item;
    count.textContent = whole.format(leader.count);
    const li = document.createElement("li");
    li.append(time, name, count);
    return li;
  });
  $("leader-list").replaceChildren(...rows);
  announceLeader(starts[0]);
}

function drawMembers() {
  const newest = newestOf(memberWindows);
  const row = memberWindows.get(newest);
  if (row === undefined) return;
  const section = $("members");
  countTo($("members-value"), Number(section.dataset.value ?? row.members), row.members);
  section.dataset.value = row.members;
  section.dataset.window = row.window_start;
  const exact = Math.round(row.lower) === Math.round(row.upper);
  const bounds = exact ? "exactly" : `between ${whole.format(row.lower)} and ${whole.format(row.upper)}`;
  const rsvps = Number.isFinite(row.rsvps) ? `${bounds ? ", " : ""}from ${whole.format(row.rsvps)} RSVPs` : "";
  $("members-bounds").textContent = bounds + rsvps;
  const values = Array.from({ length: SPARK_WINDOWS }, (_, index) => {
    const past = memberWindows.get(newest - (SPARK_WINDOWS - 1 - index) * MINUTE);
    return past === undefined ? null : past.members;
  });
  const top = niceCeiling(Math.max(...values));
  const times = values.map((_, index) => newest - (SPARK_WINDOWS - 1 - index) * MINUTE);
  charts.members.show(times, [{ values, colour: "s1", style: "bar" }], { top });
  $("members-top").textContent = `scale 0–${compact.format(top)}`;
}

/** Run the figure from one value to the next, so that a change is seen as a change. */
function countTo(element, from, to) {
  cancelAnimationFrame(memberAnimation);
  if (matchMedia("(prefers-reduced-motion: reduce)").matches || to < from || document.visibilityState === "hidden") {
    element.textContent = whole.format(to);
    return;
  }
  const began = performance.now();
  const step = (now) => {
    const done = Math.min(1, (now - began) / 450);
    element.textContent = whole.format(from + (to - from) * (1 - (1 - done) ** 3));
    if (done < 1) memberAnimation = requestAnimationFrame(step);
  };
  memberAnimation = requestAnimationFrame(step);
}

function tick() {
  const skew = topics.skew;
  const now = Date.now() + skew;
  drawClock(now);
  drawThroughput(now);
  drawLatency(now, skew);
  drawState();
  drawFooter();
}

function drawClock(now) {
  const start = newestOf(topicWindows);
  const row = topicWindows.get(start)?.[0];
  if (row === undefined) return;
  const end = Date.parse(row.window_end);
  const done = Math.min(1, Math.max(0, (now - start) / (end - start)));
  const left = Math.ceil((end - now) / 1000);
  $("window").textContent = `${clock.format(start)} – ${clock.format(end)}`;
  $("window-note").textContent = left > 0 ? (done < 0.1 ? "just begun" : "in progress") : `ended ${ago(now - end)}`;
  $("members-window").textContent = left > -60 ? "this minute" : "in the latest minute";
  $("ring").style.strokeDasharray = `${(done * 100).toFixed(2)} 100`;
  $("ring-text").textContent = left > 0 ? left : "✓";
}

function drawThroughput(now) {
  // The members' events are the RSVPs; topics stand in where there is no such table.
  const points = [rates.members, rates.top_topics].map((rate) => rate.points(now - SPAN_MS, now));
  const line = points[0].length ? points[0] : points[1];
  const top = niceCeiling(Math.max(1, ...line.map(([, value]) => value)) * 1.1);
  drawLines(charts.throughput, [line], { from: now - SPAN_MS, to: now, top });
  $("throughput-value").textContent = line.length ? short.format(line[line.length - 1][1]) : "–";
  $("throughput-top").textContent = `scale 0–${compact.format(top)}`;
}

function drawLatency(now, skew) {
  const { newest, oldest } = latency.points(skew);
  const values = oldest.map(([, value]) => value).sort((a, b) => a - b);
  const usual = values[Math.floor(values.length * 0.95)] ?? 1000; // one late batch does not flatten the line
  const top = niceCeiling(Math.max(500, usual * 1.2));
  drawLines(charts.latency, [newest, oldest], { from: now - SPAN_MS, to: now, top });
  const [fresh, stale] = [medianOfLast(newest, 10), medianOfLast(oldest, 10)];
  $("latency-value").textContent = fresh === null ? "–" : `${seconds(fresh)} – ${seconds(stale)}`;
  $("latency-top").textContent = `scale 0–${short.format(top / 1000)} s`;
}

/** Draw series of `[ms, value]` at the same times; where nothing is known for long the lines are broken. */
function drawLines(chart, series, frame) {
  const lines = series.map(() => []);
  const times = [];
  series[0].forEach(([at], index) => {
    if (at < frame.from - BREAK_MS) return;
    if (times.length && at - times.at(-1) > BREAK_MS) {
      times.push(times.at(-1) + 1);
      for (const line of lines) line.push(null);
    }
    times.push(at);
    lines.forEach((line, one) => line.push(series[one][index][1]));
  });
  chart.show(times, lines.map((values, one) => ({ values, colour: one ? "water-soft" : "s1", fill: lines.length === 1 })), frame);
}

function seconds(ms) {
  return (ms / 1000).toFixed(ms < 9_950 ? 1 : 0);
}

function ago(ms) {
  const past = Math.max(0, Math.round(ms / 1000));
  if (past < 90) return `${past} s ago`;
  return past < 5400 ? `${Math.round(past / 60)} min ago` : `${Math.round(past / 3600)} h ago`;
}

function newestOf(windows) {
  return Math.max(...windows.keys());
}

// ---- the connection

function drawState() {
  if (subscriptions.length) showState(subscriptions.map((subscription) => subscription.status));
}

function announceLeader(start) {
  if (start === undefined || start === announcedWindow) return;
  if (announcedWindow !== null) {
    const [leader] = topicWindows.get(start);
    announce(`${clock.format(start)}: ${leader.item} led with ${whole.format(leader.count)}`);
  }
  announcedWindow = start;
}

function drawFooter() {
  const sum = (field) => subscriptions.reduce((total, { counters }) => total + counters[field], 0);
  const [applied, gaps, duplicates] = [sum("applied"), sum("gaps"), sum("duplicates")];
  Object.assign(root.dataset, { applied, gaps, duplicates });
  for (const { table, counters, position } of subscriptions) {
    const section = $(table === "members" ? "members" : "topics");
    Object.assign(section.dataset, { applied: counters.applied, events: counters.events, position: position ?? "" });
  }
  $("position").textContent = shorten(topics.position ?? "–");
  $("position").dataset.position = topics.position ?? "";
  $("applied").textContent = whole.format(applied);
  $("events").textContent = whole.format(members.counters.events || topics.counters.events);
  $("integrity").textContent = integrity(gaps, duplicates);
  $("kept").textContent = subscriptions.every((s) => s.persistent) ? "a reload goes on from here" : "a reload begins anew";
}

function integrity(gaps, duplicates) {
  const gap = gaps === 0 ? "no gap" : `${gaps} gap${gaps > 1 ? "s" : ""} mended`;
  const again = duplicates === 0 ? "no duplicate" : `${duplicates} duplicate${duplicates > 1 ? "s" : ""} passed over`;
  return `${gap}, ${again}`;
}

function shorten(position) {
  return position.length <= 22 ? position : `${position.slice(0, 8)}…${position.slice(-10)}`;
}

async function copyPosition() {
  const position = topics.position;
  if (position === null) return;
  try {
    await navigator.clipboard.writeText(position);
    announce("Position copied");
    $("copy").classList.add("copied");
    setTimeout(() => $("copy").classList.remove("copied"), 1200);
  } catch {
    // Not a secure context, or not allowed: show it whole and selected, to be copied by hand.
    $("position").textContent = position;
    getSelection().selectAllChildren($("position"));
  }
}

// ---- the lines over a reload

function saveSeries() {
  const series = { members: rates.members.saved(), top_topics: rates.top_topics.saved(), latency: latency.saved() };
  try {
    sessionStorage.setItem(SERIES, JSON.stringify({ server, series }));
  } catch {
    // No storage here: the lines begin anew.
  }
}

function savedSeries() {
  try {
    const found = JSON.parse(sessionStorage.getItem(SERIES));
    sessionStorage.removeItem(SERIES);
    return found?.server === server ? found.series : {};
  } catch {
    return {};
  }
}
