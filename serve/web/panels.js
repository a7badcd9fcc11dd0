/**
 * Ways to draw rows. A panel's `show(rows, shape, chosen)` draws all that it is given and returns the choices that it offers;
 * `chosen` has those made, and `set` to make one. What a drawing tells is told in words or figures too.
 */

import { Chart, COLOURS } from "./charts.js";
import { el } from "./page.js";
import { RankedList } from "./ranked.js";

const MOST_GROUPS = COLOURS - 1;
const MOST_BARS = 20;
const GRID_ROWS = 200;
const LENGTHS = 60;
const number = new Intl.NumberFormat(undefined, { maximumFractionDigits: 2 });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const day = new Intl.DateTimeFormat(undefined, { dateStyle: "medium" });

/** A value of a row as text. */
export function shown(value, type) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return number.format(value);
  if (type === "timestamp") return moment(Date.parse(value));
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** A time of day, with the day where it is not today. */
export function moment(at) {
  const today = day.format(at) === day.format(Date.now());
  return today ? clock.format(at) : `${day.format(at)} ${clock.format(at)}`;
}

function labelOf(row, columns) {
  return columns.map((column) => shown(row[column]) || "(none)").join(" · ");
}

function timesOf(rows, time) {
  return [...new Set(rows.map((row) => Date.parse(row[time])))].sort((a, b) => a - b);
}

/** Rows of the newest windows, without those of late events: their windows may be days apart, and the axis is one. */
function recent(rows, time) {
  const length = Date.parse(rows[0]?.window_end) - Date.parse(rows[0]?.[time]);
  if (!(length > 0)) return rows;
  const from = timesOf(rows, time).at(-1) - LENGTHS * length;
  return rows.filter((row) => Date.parse(row[time]) > from);
}

/** Rows by the label of their group, those with the largest sums first; the smallest are one group. */
function grouped(rows, columns, measure) {
  const found = new Map();
  for (const row of rows) {
    const label = labelOf(row, columns);
    const group = found.get(label) ?? { label, rows: [], total: 0 };
    group.rows.push(row);
    group.total += row[measure] ?? 0;
    found.set(label, group);
  }
  const groups = [...found.values()].sort((a, b) => b.total - a.total || (a.label < b.label ? -1 : 1));
  if (groups.length <= COLOURS) return groups;
  const rest = groups.slice(MOST_GROUPS);
  const total = rest.reduce((sum, group) => sum + group.total, 0);
  return [...groups.slice(0, MOST_GROUPS), { label: `${rest.length} others`, rows: rest.flatMap((group) => group.rows), total }];
}

function summed(rows, time, measure, times) {
  const sums = new Map();
  for (const row of rows) {
    const at = Date.parse(row[time]);
    if (row[measure] !== null) sums.set(at, (sums.get(at) ?? 0) + row[measure]);
  }
  return times.map((at) => sums.get(at) ?? null);
}

/** A choice that the panel offers: of a column or a value; null where there is nothing to choose. */
function choice(label, values, value, choose) {
  return values.length < 2 ? null : { label, values, value, choose };
}

/** A chart over time with its legend: a list with a figure for each series, of the time that is pointed at or of all. */
class ChartWithLegend {
  #legend = el("ul.legend", { role: "list" });
  #plot = el("div.plot", { role: "img" });
  #head = el("p.big");
  #chart;
  #entries = [];
  #times = [];
  #overall;

  constructor(host) {
    this.#chart = new Chart(this.#plot, { onPoint: (index) => this.#tell(index) });
    host.append(this.#head, this.#plot, this.#legend);
  }

  /**
   * @param {string} label of the drawing, for those who do not see it
   * @param {string|null} figure that stands large above it, and what it is
   * @param {{name: string, values: (number|null)[], figure: number|null, colour: string}[]} series
   */
  show({ label, figure, note, overall, times, series }) {
    this.#head.replaceChildren(...(figure === undefined ? [] : [el("span.value", {}, figure), " ", el("span.note", {}, note)]));
    this.#plot.setAttribute("aria-label", label);
    this.#entries = series;
    this.#times = times;
    this.#overall = overall;
    this.#chart.show(times, series);
    this.#tell(null);
  }

  #tell(index) {
    const at = index === null ? this.#overall : moment(this.#times[index]);
    const items = this.#entries.map(({ name, values, figure, colour }) => {
      const value = index === null ? figure : values[index];
      const mark = el("span.mark", { "aria-hidden": "true" });
      mark.style.background = `var(--${colour})`;
      const item = el("li", {}, mark, el("bdi.name", { title: name }, name), el("span.count", {}, shown(value) || "–"));
      Object.assign(item.dataset, { name, value: figure ?? "" });
      return item;
    });
    this.#legend.replaceChildren(el("li.when", {}, at), ...items);
  }
}

/** Top-n of the newest window, as bars with error bounds. */
export class Ranked {
  #note = el("p.note");
  #list = el("ol.ranked", { role: "list" });
  #ranked = new RankedList(this.#list, 0);

  constructor(host) {
    host.append(this.#note, this.#list);
  }

  show(rows, { time, groups }, chosen) {
    const names = [...new Set(rows.map((row) => labelOf(row, groups)))].sort();
    const group = names.includes(chosen.group) ? chosen.group : names[0];
    const own = rows.filter((row) => labelOf(row, groups) === group && row.item !== null);
    const times = timesOf(own, time);
    const of = (at) => own.filter((row) => Date.parse(row[time]) === at).sort((a, b) => a.rank - b.rank);
    const newest = of(times.at(-1));
    this.#ranked.show(newest, of(times.at(-2)));
    const end = newest[0]?.window_end;
    this.#note.textContent = times.length ? `${moment(times.at(-1))}${end ? ` – ${moment(Date.parse(end))}` : ""}` : "No rows yet";
    return groups.length ? [choice("Group", names, group, (value) => chosen.set({ group: value }))] : [];
  }
}

/** Groups in windows, as stacked bars with running totals. */
export class Stacked {
  #drawing;

  constructor(host) {
    this.#drawing = new ChartWithLegend(host);
  }

  show(all, { time, groups, measures }, chosen) {
    const rows = recent(all, time);
    const measure = measures.includes(chosen.measure) ? chosen.measure : measures[0];
    const group = groups.includes(chosen.by) ? chosen.by : groups[0];
    const times = timesOf(rows, time);
    const found = grouped(rows, [group], measure);
    const series = found.map(({ label, rows: own, total }, index) => ({
      name: label,
      values: summed(own, time, measure, times),
      figure: total,
      colour: `s${index + 1}`,
      style: "bar",
    }));
    const total = found.reduce((sum, each) => sum + each.total, 0);
    this.#drawing.show({
      label: `${measure} by ${group} in ${times.length} windows: ${found.map((each) => `${each.label} ${shown(each.total)}`).join(", ")}`,
      figure: number.format(total),
      note: `${measure} in ${times.length} windows${rows.length < all.length ? ", without older ones" : ""}`,
      overall: "Running totals",
      times,
      series,
    });
    return [
      choice("Measure", measures, measure, (value) => chosen.set({ measure: value })),
      choice("By", groups, group, (value) => chosen.set({ by: value })),
    ];
  }
}

/** Windows as lines: one for each measure, or one for each group. */
export class Lines {
  #drawing;

  constructor(host) {
    this.#drawing = new ChartWithLegend(host);
  }

  show(all, { time, groups, measures }, chosen) {
    const rows = recent(all, time);
    const times = timesOf(rows, time);
    const measure = measures.includes(chosen.measure) ? chosen.measure : measures[0];
    const lines = groups.length
      ? grouped(rows, groups, measure).map(({ label, rows: own }) => [label, summed(own, time, measure, times)])
      : measures.slice(0, COLOURS).map((name) => [name, summed(rows, time, name, times)]);
    const series = lines.map(([name, values], index) => {
      return { name, values, figure: values.at(-1) ?? null, colour: `s${index + 1}`, fill: lines.length === 1 };
    });
    const last = times.length ? moment(times.at(-1)) : "";
    this.#drawing.show({
      label: `${groups.length ? measure : measures.join(", ")} over ${times.length} windows; at ${last}: ${series.map((one) => `${one.name} ${shown(one.figure)}`).join(", ")}`,
      overall: `At ${last}`,
      times,
      series,
    });
    return groups.length ? [choice("Measure", measures, measure, (value) => chosen.set({ measure: value }))] : [];
  }
}

/** Distinct counts over windows, with error bars. */
export class Estimate {
  #drawing;

  constructor(host) {
    this.#drawing = new ChartWithLegend(host);
  }

  show(all, { time, groups, measures: [measure] }, chosen) {
    const rows = recent(all, time);
    const names = [...new Set(rows.map((row) => labelOf(row, groups)))].sort();
    const group = names.includes(chosen.group) ? chosen.group : names[0];
    const own = new Map(rows.filter((row) => labelOf(row, groups) === group).map((row) => [Date.parse(row[time]), row]));
    const times = [...own.keys()].sort((a, b) => a - b);
    const column = (name) => times.map((at) => own.get(at)[name]);
    const newest = own.get(times.at(-1));
    const bounds = newest && `between ${number.format(Math.round(newest.lower))} and ${number.format(Math.round(newest.upper))}`;
    const series = { name: measure, values: column(measure), figure: newest?.[measure] ?? null, colour: "s1", fill: true };
    this.#drawing.show({
      label: `distinct ${measure} over ${times.length} windows, with error bars; the newest: ${shown(newest?.[measure])}, ${bounds}`,
      figure: newest ? number.format(Math.round(newest[measure])) : "–",
      note: newest ? `distinct in the newest window, ${bounds}` : "No rows yet",
      overall: times.length ? `At ${moment(times.at(-1))}` : "",
      times,
      series: [{ ...series, low: column("lower"), high: column("upper") }],
    });
    return groups.length ? [choice("Group", names, group, (value) => chosen.set({ group: value }))] : [];
  }
}

/** Groups without windows, as bars with their total. */
export class Groups {
  #head = el("p.big");
  #list = el("ol.bars", { role: "list" });

  constructor(host) {
    host.append(this.#head, this.#list);
  }

  show(rows, { groups, measures }, chosen) {
    const measure = measures.includes(chosen.measure) ? chosen.measure : measures[0];
    const values = rows.map((row) => [labelOf(row, groups), row[measure] ?? 0]).sort((a, b) => b[1] - a[1]);
    const total = values.reduce((sum, [, value]) => sum + value, 0);
    const full = Math.max(1e-9, ...values.map(([, value]) => Math.abs(value)));
    const items = values.slice(0, MOST_BARS).map(([label, value]) => {
      const bar = el("span.bar", { "aria-hidden": "true" });
      bar.style.width = `${(Math.abs(value) / full) * 100}%`;
      const name = el("bdi.name", { title: label, dir: "auto" }, label);
      const item = el("li", {}, name, el("span.count", {}, shown(value)), el("span.track", { "aria-hidden": "true" }, bar));
      Object.assign(item.dataset, { name: label, value });
      return item;
    });
    const more = values.length > MOST_BARS ? `, the largest ${MOST_BARS} of ${values.length}` : "";
    this.#head.replaceChildren(el("span.value", {}, shown(total)), " ", el("span.note", {}, `${measure} in all${more}`));
    this.#list.replaceChildren(...items);
    return [choice("Measure", measures, measure, (value) => chosen.set({ measure: value }))];
  }
}

/** One row as figures. */
export class Figures {
  #list = el("dl.figures");

  constructor(host) {
    host.append(this.#list);
  }

  show([row], { columns }) {
    const items = columns.map((column) => {
      const item = el("div", {}, el("dt", {}, column), el("dd", {}, shown(row?.[column]) || "–"));
      Object.assign(item.dataset, { name: column, value: row?.[column] ?? "" });
      return item;
    });
    this.#list.replaceChildren(...items);
    return [];
  }
}

/** Rows as a table that can be sorted by each column: newest first, else by key. */
export class Grid {
  #table = el("table");
  #note = el("p.note");
  #sort = null;
  #again = () => {};
  #before = new Map();

  constructor(host) {
    host.append(el("div.scroll", { tabIndex: 0, role: "region", "aria-label": "Rows" }, this.#table), this.#note);
  }

  show(rows, shape) {
    const { columns, key, types, time } = shape;
    const sort = this.#sort ?? { column: time ?? key[0] ?? columns[0], down: time !== undefined };
    const sorted = [...rows].sort((a, b) => ordered(a[sort.column], b[sort.column]) * (sort.down ? -1 : 1));
    const heads = columns.map((column) => {
      const press = () => {
        this.#sort = { column, down: sort.column === column ? !sort.down : types[column] !== "text" };
        this.#again();
      };
      const button = el("button", { type: "button", onclick: press }, column);
      const direction = sort.column === column ? (sort.down ? "descending" : "ascending") : "none";
      return el(numeric(types[column]) ? "th.number" : "th", { scope: "col", "aria-sort": direction }, button);
    });
    const focused = [...this.#table.querySelectorAll("th button")].indexOf(document.activeElement);
    const now = new Map(rows.map((row) => [JSON.stringify(key.map((column) => row[column])), row]));
    const body = sorted.slice(0, GRID_ROWS).map((row) => {
      const name = JSON.stringify(key.map((column) => row[column]));
      const fresh = this.#before.size > 0 && this.#before.get(name) !== row;
      const cells = columns.map((column) => {
        const text = shown(row[column], types[column]);
        return el(numeric(types[column]) ? "td.number" : "td", { title: text, dir: "auto" }, text);
      });
      return el(fresh ? "tr.fresh" : "tr", {}, ...cells);
    });
    this.#before = now;
    this.#table.replaceChildren(el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...body));
    if (focused >= 0) this.#table.querySelectorAll("th button")[focused]?.focus();
    this.#note.textContent = rows.length > GRID_ROWS ? `The first ${GRID_ROWS} of ${number.format(rows.length)} rows` : `${rows.length} rows`;
    this.#again = () => this.show(rows, shape);
    return [];
  }
}

function numeric(type) {
  return ["integer", "float", "decimal"].includes(type);
}

function ordered(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return a < b ? -1 : 1;
}

/** Panel classes by the way of {@link shapeOf}. */
export const PANELS = {
  ranked: ["Ranking", Ranked],
  stacked: ["Stacked bars", Stacked],
  lines: ["Lines", Lines],
  estimate: ["Estimate", Estimate],
  groups: ["Bars", Groups],
  figures: ["Figures", Figures],
  grid: ["Rows", Grid],
};
