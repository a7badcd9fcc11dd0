/** Follow what a page can hold of a table: the newest windows, or all rows where they are few. */

import { Locked, subscribe } from "./client/millrace.js";
import { access, ask, Problem, server, store, stored } from "./page.js";

const MOST_ROWS = 5_000;
const AGAIN_MS = 2_000;
const SINCE = "millrace.since"; // from when on each view was followed: the same view again goes on from its position
const MOST_SINCE = 50;

/** The rows are too many for a page. */
export class TooMany extends Error {
  /** @param {Object[]} sample some of them */
  constructor(count, sample) {
    super(`${count.toLocaleString()} rows are too many for a page: narrow them with a condition`);
    this.count = count;
    this.sample = sample;
  }
}

/**
 * Follow a view until it is closed. While the server is away it is asked again.
 *
 * @param {Object} view
 * @param {string} view.table
 * @param {string} [view.where]
 * @param {string} [view.select] instead of `where`; it is followed as it is
 * @param {string} [view.time] the column of time in the key; only the newest values of it are followed
 * @param {number} [view.times] how many of them
 * @param {Object} on
 * @param {(change: Object, subscription: Object) => void} on.change as the client's `onChange`
 * @param {(status: Object) => void} on.state as the client's `onState`; `refused` with a `detail` is final
 * @param {(error: TooMany) => void} [on.tooMany]
 * @returns {{close: () => void, subscription: () => Object|null}}
 */
export function follow(view, on) {
  let subscription = null;
  let closed = false;
  let timer = 0;

  async function begin() {
    try {
      const where = await bounded(view);
      if (closed) return;
      const prune = view.select ? undefined : (rows) => oldest(rows, view);
      const options = { where, select: view.select, prune, access, transport: stored("millrace.transport", "auto"), conflate: true };
      const heard = { onChange: (change) => on.change(change, subscription), onState: on.state };
      subscription = subscribe(server, view.table, { ...options, ...heard, waitForTable: true });
    } catch (error) {
      if (closed) return;
      if (error instanceof TooMany) on.tooMany?.(error);
      else if (error instanceof Locked) on.state({ state: "locked", table: view.table, detail: error.message });
      else if (error instanceof Problem && error.status < 500 && error.status !== 404 && error.status !== 429) {
        on.state({ state: "refused", table: view.table, code: error.code, detail: error.message });
      } else {
        const state = error.status === 404 ? "missing" : "reconnecting";
        on.state({ state, table: view.table, detail: error.message, retryAt: Date.now() + AGAIN_MS });
        timer = setTimeout(begin, AGAIN_MS);
      }
    }
  }

  void begin();
  return {
    subscription: () => subscription,
    close() {
      closed = true;
      clearTimeout(timer);
      subscription?.close();
    },
  };
}

/** The view's condition, with the bound on its time. Throws TooMany, and what {@link ask} throws. */
async function bounded({ table, where, select, time, times }) {
  const path = `v1/tables/${table}`;
  if (select) {
    const { rows } = await ask(path, { select, limit: MOST_ROWS + 1 });
    if (rows.length > MOST_ROWS) throw new TooMany(rows.length, rows.slice(0, 100));
    return undefined;
  }
  if (time === undefined) {
    const [{ n }] = (await ask(path, { select: "SELECT count(*) AS n", where })).rows;
    if (n > MOST_ROWS) throw new TooMany(n, (await ask(path, { where, limit: 100 })).rows);
    return where;
  }
  const name = JSON.stringify([table, where, times]);
  const known = stored(SINCE, {});
  let since = known[name];
  try {
    const select_ = `SELECT "${time}" AS at, count(*) AS n GROUP BY "${time}"`;
    since = sinceWhen((await ask(path, { select: select_, where })).rows, times, since);
  } catch (error) {
    if (since === undefined || error instanceof Problem || error instanceof Locked || error instanceof TooMany) throw error;
  } // where the server is away, what is stored in this browser is shown
  if (since === undefined) return where;
  const others = Object.entries(known).filter(([other]) => other !== name);
  store(SINCE, Object.fromEntries([...others.slice(1 - MOST_SINCE), [name, since]]));
  const bound = `"${time}" >= ${since.includes("T") ? "TIMESTAMP" : "DATE"} '${since}'`;
  return where ? `(${where}) AND ${bound}` : bound;
}

/** The oldest of the newest `times` whose rows a page can hold; `before`, where that is not twice as much. */
function sinceWhen(counted, times, before) {
  const rows = counted.filter(({ at }) => at !== null).sort((a, b) => Date.parse(b.at) - Date.parse(a.at));
  let [since, sum] = [undefined, 0];
  for (const [index, { at, n }] of rows.entries()) {
    sum += n;
    const most = before === undefined ? 1 : 2;
    if (index >= times * most || sum > MOST_ROWS * most) break;
    if (at === before) return before;
    if (index < times && sum <= MOST_ROWS) since = at;
  }
  if (since === undefined && rows.length > 0) throw new TooMany(rows[0].n, []);
  return since;
}

function oldest(rows, { time, times }) {
  if (time === undefined) return rows.size > MOST_ROWS ? [...rows.keys()].slice(0, rows.size - MOST_ROWS) : [];
  const found = [...new Set([...rows.values()].map((row) => Date.parse(row[time])))].sort((a, b) => b - a);
  if (found.length <= times) return [];
  return [...rows].filter(([, row]) => Date.parse(row[time]) < found[times - 1]).map(([key]) => key);
}
