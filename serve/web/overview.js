/** What runs: every table with its rows, rate and lag; alerts, quality and quarantine. */

import { Chart } from "./charts.js";
import { Locked } from "./client/millrace.js";
import { follow } from "./follow.js";
import { access, ask, el, server, store, stored } from "./page.js";
import { moment, shown } from "./panels.js";

const POLL_MS = 1_000;
const KEPT = 120; // rates of each table, one a poll
const SILENT_MS = 60_000;
const MOST_LISTED = 6;
const STORED = "millrace.tables"; // so that a reload shows the page at once, also while the server is away
const KINDS = {
  top_n: "top n",
  distinct: "distinct count",
  count_window: "windows by count",
  quarantine: "rejected events",
  alerts: "alerts raised and cleared",
  quality: "findings of expectations",
  warnings: "events that were warned of",
  loads: "loaded files",
};
const rate = new Intl.NumberFormat(undefined, { maximumSignificantDigits: 3 });
const whole = new Intl.NumberFormat();

/** What a table is, in a few words. */
export function kindOf({ table, layer, declared }) {
  if (declared === undefined) return KINDS[table] ?? (layer === "bronze" ? "events as they came" : "table");
  const kind = KINDS[declared.kind] ?? declared.kind.replaceAll("_", " ");
  const parts = [kind, declared.by?.length ? `by ${declared.by.join(", ")}` : "", declared.window ? `a ${declared.window}` : ""];
  return `${parts.filter(Boolean).join(" ").replace(" a 1 ", " a ")} of ${declared.from.join(" and ")}`;
}

/** How long ago, in a few characters. */
export function ago(ms) {
  const past = Math.max(0, ms / 1000);
  if (past < 10) return `${past.toFixed(1)} s`;
  if (past < 90) return `${Math.round(past)} s`;
  return past < 5400 ? `${Math.round(past / 60)} min` : past < 129_600 ? `${Math.round(past / 3600)} h` : `${Math.round(past / 86_400)} d`;
}

/** Asks again and again for `GET /v1/tables`, while the page is seen. */
export class Tables {
  /** The tables as they were last told. @type {Object[]} */
  found = access.keyed ? [] : stored(STORED, []);
  status = { state: "connecting" };
  /** Where the report on quality is. @type {string|undefined} */
  report;
  /** Events a second of each table at the last polls, null where it does not say. @type {Map<string, (number|null)[]>} */
  rates = new Map();
  #told;
  #timer = 0;

  /** @param {() => void} told something has changed */
  constructor(told) {
    this.#told = told;
    document.addEventListener("visibilitychange", () => this.#poll());
    void this.#poll();
  }

  async #poll() {
    clearTimeout(this.#timer);
    if (document.visibilityState === "hidden") return;
    try {
      const { tables, report } = await ask("v1/tables");
      Object.assign(this, { found: tables, report });
      this.status = { state: "live" };
      for (const { table, events_per_s: rate = null } of this.found) {
        this.rates.set(table, [...(this.rates.get(table) ?? []), rate].slice(-KEPT));
      }
      if (!access.keyed) store(STORED, this.found);
    } catch (error) {
      const state = error instanceof Locked ? "locked" : "reconnecting";
      this.status = { state, detail: error.message, retryAt: 0 };
    }
    this.#told();
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#poll(), POLL_MS);
  }
}

export class Overview {
  #host;
  #rows = new Map(); // table -> its row and what is in it
  #body = el("tbody");
  #tiles = {};
  #lists = {};
  #followed = {};
  #state;
  #docs = el("a", { hidden: true }, "Data Docs");

  /** @param {() => void} state a status has changed */
  constructor(host, state) {
    this.#host = host;
    this.#state = state;
    const heads = ["Table", "Rows", "Events/s", "Newest event", "Last two minutes"];
    const head = el("tr", {}, ...heads.map((text, at) => el(at > 0 && at < 4 ? "th.number" : "th", { scope: "col" }, text)));
    const tile = (name, label, table) => {
      const value = el("span.value", {}, "–");
      const note = el("span.note", {}, label);
      this.#tiles[name] = el("a.tile", { href: table ? `#table=${table}` : "#" }, value, note);
      this.#tiles[name].dataset.tile = name;
      return this.#tiles[name];
    };
    const list = (name, title, ...more) => {
      this.#lists[name] = el("ul", { role: "list" });
      return el("section", { "aria-label": title }, el("div.head", {}, el("h2", {}, title), ...more), this.#lists[name]);
    };
    host.replaceChildren(
      el(
        "div.tiles",
        {},
        tile("rate", "events a second"),
        tile("lag", "since the newest event"),
        tile("alerts", "alerts raised", "alerts"),
        tile("quality", "expectations not met", "quality"),
        tile("quarantine", "events in quarantine", "quarantine"),
      ),
      el(
        "div.columns-2",
        {},
        el("section", { "aria-label": "Tables" }, el("table.tables", {}, el("caption.unseen", {}, "Tables"), el("thead", {}, head), this.#body)),
        el(
          "div.side",
          {},
          list("alerts", "Alerts"),
          list("quality", "Quality", this.#docs),
          list("quarantine", "Quarantine"),
        ),
      ),
    );
  }

  get statuses() {
    return Object.values(this.#followed).map(({ status }) => status);
  }

  close() {
    for (const { followed } of Object.values(this.#followed)) followed.close();
    this.#followed = {};
  }

  /** @param {Tables} tables to be drawn */
  show({ found: tables, rates, report }) {
    this.#docs.hidden = report === undefined || access.keyed; // a link shows no key
    if (report !== undefined) this.#docs.href = `${server}/${report}`;
    const names = tables.map(({ table }) => table);
    for (const [name, { row }] of this.#rows) {
      if (!names.includes(name)) {
        row.remove();
        this.#rows.delete(name);
      }
    }
    const place = ({ served, declared, layer }) => ["gold", "silver", "bronze"].indexOf(layer) + (declared ? 0 : 3) + (served ? 0 : 6);
    const inOrder = [...tables].sort((a, b) => place(a) - place(b));
    inOrder.forEach((table, at) => {
      const { row } = this.#draw(table, rates.get(table.table) ?? []);
      if (this.#body.children[at] !== row) this.#body.insertBefore(row, this.#body.children[at] ?? null);
    });
    const fresh = tables.filter(({ newest_at: at }) => at);
    const newest = Math.max(...fresh.map(({ newest_at: at }) => at));
    this.#tile("rate", rate.format(Math.max(0, ...tables.map((table) => table.events_per_s ?? 0))));
    this.#tile("lag", fresh.length ? ago(Date.now() - newest) : "–");
    this.#listen("alerts", names, { table: "alerts", where: "state = 'raised'" });
    this.#listen("quality", names, { table: "quality", time: "at", times: 50 });
    this.#listen("quarantine", names, { table: "quarantine", select: "SELECT source, reason, count(*) AS n GROUP BY source, reason" });
  }

  #draw(table, rates) {
    const parts = this.#rows.get(table.table) ?? this.#rowFor(table.table);
    const lag = table.newest_at ? Date.now() - table.newest_at : null;
    parts.kind.textContent = table.detail && !table.served ? table.detail : kindOf(table);
    parts.rows.textContent = table.rows === undefined ? "" : whole.format(table.rows);
    const counts = table.events_per_s !== undefined && table.newest_at !== null; // its commits say how many events they add
    parts.rate.textContent = counts ? rate.format(table.events_per_s) : "";
    parts.lag.textContent = lag === null ? "" : ago(lag);
    parts.name.firstChild.replaceWith(table.served ? parts.link : table.table);
    parts.row.className = table.served ? (lag !== null && lag > SILENT_MS ? "silent" : "") : "unserved";
    parts.row.toggleAttribute("data-counts", counts);
    Object.assign(parts.row.dataset, { table: table.table, rows: table.rows ?? "", rate: table.events_per_s ?? "", lag: lag ?? "" });
    if (counts) {
      const times = rates.map((_, at) => Date.now() - (rates.length - 1 - at) * POLL_MS);
      parts.chart.show(times, [{ values: rates, colour: "s1", fill: true }], { from: Date.now() - KEPT * POLL_MS, to: Date.now() });
    }
    return parts;
  }

  #rowFor(name) {
    const link = el("a", { href: `#table=${name}` }, name);
    const [kind, spark] = [el("span.note"), el("span.spark", { "aria-hidden": "true" })];
    const title = el("span.title", {}, link);
    const [rows, rates, lag] = [el("td.number"), el("td.number"), el("td.number")];
    rows.dataset.label = "rows";
    rates.dataset.label = "events/s";
    lag.dataset.label = "newest event";
    const row = el("tr", {}, el("th", { scope: "row" }, el("div", {}, title), kind), rows, rates, lag, el("td.sparkcell", {}, spark));
    const parts = { row, name: title, link, kind, rows, rate: rates, lag, chart: new Chart(spark, { plain: true }) };
    this.#rows.set(name, parts);
    return parts;
  }

  #tile(name, text, bad = false) {
    this.#tiles[name].querySelector(".value").textContent = text;
    this.#tiles[name].classList.toggle("bad", bad);
    this.#tiles[name].dataset.value = text;
  }

  /** Follow one of the tables of every pipeline, once there is such a table. */
  #listen(name, names, view) {
    if (!names.includes(view.table)) {
      if (this.#tiles[name].dataset.value === undefined) this.#news(name, []);
    } else if (this.#followed[name] === undefined) {
      const entry = { status: { state: "connecting", table: view.table } };
      this.#followed[name] = entry;
      entry.followed = follow(view, {
        change: ({ rows }) => this.#news(name, [...rows.values()]),
        tooMany: ({ count }) => this.#tile(name, `${whole.format(count)}+`, true),
        state: (status) => {
          entry.status = status;
          this.#state();
        },
      });
    }
  }

  #news(name, rows) {
    const [count, items] = { alerts: alertNews, quality: qualityNews, quarantine: quarantineNews }[name](rows);
    this.#tile(name, whole.format(count), count > 0);
    const more = items.length - MOST_LISTED;
    const listed = items.slice(0, MOST_LISTED).map(([title, text]) => el("li", {}, el("b", {}, title), " ", el("span.note", {}, text)));
    const link = el("a", { href: `#table=${name}` }, `${more} more`);
    this.#lists[name].replaceChildren(...listed, ...(more > 0 ? [el("li", {}, link)] : []));
    if (items.length === 0) this.#lists[name].append(el("li.note", {}, name === "quality" ? "No findings. Run: millrace quality" : "None"));
  }
}

function alertNews(rows) {
  const raised = rows.sort((a, b) => Date.parse(b.raised_at) - Date.parse(a.raised_at));
  return [rows.length, raised.map((row) => [row.alert, `${row.key} ${shown(row.value)} since ${moment(Date.parse(row.raised_at))}`])];
}

/** The newest finding of each expectation; those that are not met come first. */
function qualityNews(rows) {
  const newest = new Map();
  for (const row of [...rows].sort((a, b) => Date.parse(a.at) - Date.parse(b.at))) newest.set(`${row.table}\n${row.expectation}`, row);
  const findings = [...newest.values()].sort((a, b) => a.success - b.success);
  const told = (row) => (row.success ? `met, ${moment(Date.parse(row.at))}` : `not met: ${row.observed || `${row.unexpected} of ${row.total} rows`}`);
  return [findings.filter(({ success }) => !success).length, findings.map((row) => [`${row.table}: ${row.expectation}`, told(row)])];
}

function quarantineNews(rows) {
  const sum = rows.reduce((total, { n }) => total + n, 0);
  return [sum, [...rows].sort((a, b) => b.n - a.n).map(({ source, reason, n }) => [`${whole.format(n)} of ${source}`, reason])];
}
