/** The dashboard: the tables of whatever runs, each of them live, and SQL over them. What is shown stands in the address. */

import { Locked } from "./client/millrace.js";
import { ago, kindOf, Overview, Tables } from "./overview.js";
import { $, announce, ask, el, Problem, showState, store, stored } from "./page.js";
import { shapeOf, typesOf } from "./shape.js";
import { LiveView } from "./view.js";

const AGAIN_MS = 2_000;
const PROBED = 500; // rows of a SELECT's result that tell its types
const whole = new Intl.NumberFormat();
const short = new Intl.NumberFormat(undefined, { maximumSignificantDigits: 3 });

let page = null;
const tables = new Tables(() => {
  const names = tables.found.map(({ table }) => table);
  $("example").hidden = !(names.includes("top_topics") && names.includes("members"));
  page?.tables();
  tell();
});

/** What the address asks for: `table` and `where`, or `sql`; and how it is drawn. */
function asked() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

function go(address) {
  const text = new URLSearchParams(Object.entries(address).filter(([, value]) => value)).toString();
  if (`#${text}` === location.hash) open();
  else location.hash = text;
}

/** Put a choice into the address without going anywhere. */
function choose(choice) {
  history.replaceState(null, "", `#${new URLSearchParams({ ...asked(), ...choice })}`);
}

function tell() {
  const others = page?.statuses() ?? [];
  showState([tables.status, ...others.filter(({ state }) => state !== "missing")]);
}

/** Show what the address asks for. */
function open() {
  page?.close();
  refuse("");
  const address = asked();
  if (address.sql) page = new SqlPage(address);
  else if (address.table) page = new TablePage(address);
  else page = new OverviewPage();
  document.title = address.sql ? "SQL – Millrace" : address.table ? `${address.table} – Millrace` : "Millrace";
  page.tables();
  tell();
}

class OverviewPage {
  #overview = new Overview($("main"), tell);

  tables() {
    this.#overview.show(tables);
  }

  statuses() {
    return this.#overview.statuses;
  }

  close() {
    this.#overview.close();
  }
}

class TablePage {
  #address;
  #view = null;
  #shape = "";
  #kind = el("p.note");
  #facts = el("dl.facts");
  #host = el("section.view", { id: "view", "aria-labelledby": "title" });
  #where;

  constructor(address) {
    this.#address = address;
    this.#where = el("input", { id: "where", value: address.where ?? "", placeholder: "any condition in SQL", spellcheck: false });
    const form = el(
      "form.where",
      {
        onsubmit: (event) => {
          event.preventDefault();
          go({ ...asked(), where: this.#where.value.trim() });
        },
      },
      el("label", { htmlFor: "where" }, "Rows where"),
      this.#where,
      el("button", { type: "submit" }, "Apply"),
    );
    const head = el("div", {}, el("h1", { id: "title" }, address.table), this.#kind);
    $("main").replaceChildren(el("nav", { "aria-label": "Where you are" }, el("a", { href: "#" }, "← Tables")), el("div.head", {}, head, this.#facts), form, this.#host);
    if (!$("statement").value.trim()) $("statement").placeholder = `SELECT … FROM ${address.table} WHERE …`;
  }

  tables() {
    const entry = tables.found.find(({ table }) => table === this.#address.table);
    if (entry === undefined || !entry.served) {
      const why = entry === undefined ? "There is no such table yet." : (entry.detail ?? "It is not in the server's memory; query it with SQL.");
      if (this.#view === null && tables.found.length) this.#host.replaceChildren(el("p.notice", { role: "status" }, why));
      return;
    }
    const shape = shapeOf(entry);
    this.#kind.textContent = `${kindOf(entry)}, ${entry.layer}`;
    this.#tellFacts(entry);
    if (this.#shape === JSON.stringify(shape)) return;
    this.#shape = JSON.stringify(shape);
    this.#view?.close();
    const { table, where, ...chosen } = this.#address;
    this.#view = new LiveView(this.#host, { table, where }, shape, chosen, { choose, state: tell });
  }

  statuses() {
    return this.#view === null ? [] : [this.#view.status];
  }

  close() {
    this.#view?.close();
  }

  #tellFacts(entry) {
    const facts = [
      ["Rows", entry.rows === undefined ? "" : whole.format(entry.rows)],
      ["Events/s", entry.events_per_s === undefined ? "" : short.format(entry.events_per_s)],
      ["Newest event", entry.newest_at ? ago(Date.now() - entry.newest_at) : ""],
      ["Version", whole.format(entry.version)],
    ];
    this.#facts.replaceChildren(...facts.filter(([, text]) => text).map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text))));
  }
}

class SqlPage {
  #address;
  #view = null;
  #timer = 0;
  #closed = false;
  #status = { state: "connecting" };
  #host = el("section.view", { id: "view", "aria-labelledby": "title" });

  constructor(address) {
    this.#address = address;
    $("statement").value = address.sql;
    const head = el("h1", { id: "title" }, "Live result");
    $("main").replaceChildren(el("nav", { "aria-label": "Where you are" }, el("a", { href: "#" }, "← Tables")), head, this.#host);
    void this.#begin();
  }

  tables() {}

  statuses() {
    return [this.#view?.status ?? this.#status];
  }

  close() {
    this.#closed = true;
    clearTimeout(this.#timer);
    this.#view?.close();
  }

  /** Ask for the result once: what is wrong with the statement is told at once, and so are its columns. */
  async #begin() {
    const { sql, ...chosen } = this.#address;
    const table = tableOf(sql);
    if (table === null) return this.#refused("FROM names no table");
    try {
      const result = await ask(`v1/tables/${table}`, { select: sql, limit: PROBED });
      if (this.#closed) return;
      const entry = tables.found.find((each) => each.table === table) ?? (await ask("v1/tables")).tables.find((each) => each.table === table);
      const shape = shapeOfResult(result, entry);
      this.#view = new LiveView(this.#host, { table, select: sql }, shape, chosen, { choose, state: tell });
    } catch (error) {
      if (this.#closed) return;
      if (error instanceof Problem && error.status < 500) return this.#refused(error.message);
      this.#status = { state: error instanceof Locked ? "locked" : "reconnecting", detail: error.message, retryAt: Date.now() + AGAIN_MS };
      this.#timer = setTimeout(() => this.#begin(), AGAIN_MS);
    }
    tell();
  }

  #refused(text) {
    this.#status = { state: "refused", detail: text };
    this.#host.replaceChildren();
    refuse(text);
    tell();
  }
}

/** A SELECT of all columns is drawn like its table, another one of rows as rows, an aggregate by its own key. */
function shapeOfResult({ table, key, columns, select, rows }, entry) {
  if (select !== undefined) {
    const retyped = (found) => shapeOf({ table, key, columns, types: typesOf(columns, found), declared: { kind: "select" } });
    return { ...retyped(rows), retyped: rows.length ? undefined : retyped };
  }
  const whole = entry.columns.every((column) => columns.includes(column));
  return shapeOf({ ...entry, columns, declared: whole ? entry.declared : undefined });
}

/** The table that a statement reads; null where it names none. */
function tableOf(sql) {
  const bare = sql.replace(/--.*$/gm, " ").replace(/\/\*[\s\S]*?\*\//g, " ").replace(/'(?:[^']|'')*'/g, "''");
  return /\bfrom\s+"?([a-z][a-z0-9_]*)"?/i.exec(bare)?.[1] ?? null;
}

// ---- the SQL box

function refuse(text) {
  $("sql-error").textContent = text;
  $("statement").setAttribute("aria-invalid", String(text !== ""));
}

function followSql(event) {
  event.preventDefault();
  const sql = $("statement").value.trim().replace(/;$/, "");
  if (sql) go({ sql });
  else refuse("Write a SELECT");
}

/** Have the driver keep the statement's result as a table, and tell how that goes. */
async function register() {
  const [name, sql] = [$("query-name").value.trim(), $("statement").value.trim().replace(/;$/, "")];
  const key = $("query-key").value.split(",").map((column) => column.trim()).filter(Boolean);
  refuse("");
  $("query-note").textContent = "";
  try {
    let query = await ask("v1/queries", {}, { name, sql, key, from: $("query-from").value });
    while (!["running", "failed"].includes(query.state)) {
      const told = `${name} is registered and ${query.state === "waiting" ? "waits for the driver" : query.state}.`;
      if ($("query-note").textContent !== told) $("query-note").textContent = told;
      await new Promise((done) => setTimeout(done, 1_000));
      if ($("query-name").value.trim() !== name) return; // the next one is written
      query = await ask(`v1/queries/${name}`);
    }
    if (query.state === "failed") return refuse(`${name} failed: ${query.detail ?? "the driver's log says why"}`);
    $("query-note").replaceChildren(`${name} is running: `, el("a", { href: `#table=${name}` }, "show it"));
  } catch (error) {
    refuse(error.message);
  }
}

$("sql").addEventListener("submit", followSql);
$("statement").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) followSql(event);
});
$("statement").addEventListener("input", () => store("millrace.sql", $("statement").value));
$("keep").addEventListener("click", () => {
  $("keeping").hidden = !$("keeping").hidden;
  $("keep").setAttribute("aria-expanded", String(!$("keeping").hidden));
  if (!$("keeping").hidden) $("query-name").focus();
});
$("register").addEventListener("click", register);

// ---- begin

$("statement").value = stored("millrace.sql", "");
$("transport").value = stored("millrace.transport", "auto");
$("transport").addEventListener("change", () => {
  store("millrace.transport", $("transport").value);
  announce(`Transport: ${$("transport").selectedOptions[0].textContent}`);
  open();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address says what is shown
  $("main").focus();
});
addEventListener("hashchange", () => {
  open();
  $("main").focus({ preventScroll: true });
});
setInterval(tell, 500);
open();
