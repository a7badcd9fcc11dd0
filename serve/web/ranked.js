/** The ranked list: bars that grow with their counts, rows that glide when ranks change. */

const GLIDE = { duration: 520, easing: "cubic-bezier(.2, .7, .2, 1)" };
// A bar is measured against the leader of the minute before, so that the list fills as the minute goes on, unless that
// leader is so far ahead (a burst, a catch-up) that nothing could be seen.
const STRETCH = 4;
const NUMBER = new Intl.NumberFormat();
const still = matchMedia("(prefers-reduced-motion: reduce)");

/** Keeps an `<ol>` equal to the rows of one window. */
export class RankedList {
  #list;
  #items = new Map(); // item -> its <li> and parts
  #blanks;

  /**
   * @param {HTMLOListElement} list
   * @param {number} places that are seen even where nobody holds them
   */
  constructor(list, places) {
    this.#list = list;
    this.#blanks = Array.from({ length: places }, (_, index) => blank(index + 1));
    list.replaceChildren(...this.#blanks);
  }

  /**
   * Show a window.
   *
   * @param {Object[]} rows `{rank, item, count, error}` in order of rank
   * @param {Object[]} before the rows of the window before, to tell who rose and fell; empty if there is none
   */
  show(rows, before) {
    const old = new Map([...this.#items].map(([item, entry]) => [item, position(entry)]));
    const ranks = new Map(before.map((row) => [String(row.item), row.rank]));
    const full = scale(rows, before);
    const kept = new Map();
    for (const row of rows) {
      const item = String(row.item);
      const entry = this.#items.get(item) ?? entryFor(item);
      kept.set(item, entry);
      fill(entry, row, before.length ? ranks.get(item) : row.rank);
    }
    this.#items = kept;
    const wanted = [...kept.values()].map((entry) => entry.li).concat(this.#blanks.slice(kept.size));
    order(this.#list, wanted);
    for (const [index, row] of rows.entries()) {
      const item = String(row.item);
      if (kept.get(item).li === wanted[index]) move(kept.get(item), old.get(item), row.count / full);
    }
  }
}

function scale(rows, before) {
  const leader = Math.max(1, ...rows.map((row) => row.count));
  const last = Math.max(0, ...before.map((row) => row.count));
  return Math.max(leader, Math.min(last, leader * STRETCH));
}

function fill(entry, row, rankBefore) {
  entry.li.dataset.rank = row.rank;
  entry.li.dataset.item = row.item;
  entry.li.dataset.count = row.count;
  entry.rank.textContent = row.rank;
  entry.count.textContent = NUMBER.format(row.count);
  entry.error.textContent = row.error > 0 ? `± ${NUMBER.format(row.error)}` : "";
  const rise = rankBefore === undefined ? null : rankBefore - row.rank;
  entry.trend.className = `trend ${rise === null ? "new" : rise > 0 ? "up" : rise < 0 ? "down" : "same"}`;
  entry.trend.textContent = rise === null ? "new" : rise > 0 ? `▲ ${rise}` : rise < 0 ? `▼ ${-rise}` : "";
}

/** Where a row and its bar are seen now, in the middle of a movement too. */
function position(entry) {
  const bar = new DOMMatrixReadOnly(getComputedStyle(entry.bar).transform);
  return { top: entry.li.getBoundingClientRect().top, shift: bar.e };
}

function move(entry, from, grown) {
  const target = `translateX(${((grown - 1) * 100).toFixed(2)}%)`;
  entry.bar.style.transform = target;
  for (const animation of [...entry.li.getAnimations(), ...entry.bar.getAnimations()]) animation.cancel();
  if (still.matches || document.visibilityState === "hidden") return;
  if (from === undefined) {
    entry.li.animate([{ opacity: 0 }, { opacity: 1 }], GLIDE);
    entry.bar.animate([{ transform: "translateX(-100%)" }, { transform: target }], GLIDE);
    return;
  }
  const dy = from.top - entry.li.getBoundingClientRect().top;
  if (Math.abs(dy) > 1) {
    entry.li.animate([{ transform: `translateY(${dy}px)` }, { transform: "none" }], GLIDE);
  }
  entry.bar.animate([{ transform: `translateX(${from.shift}px)` }, { transform: target }], GLIDE);
}

/** Make `wanted` the children of `list`, touching only those out of place. */
function order(list, wanted) {
  const keep = new Set(wanted);
  for (const child of [...list.children]) if (!keep.has(child)) child.remove();
  wanted.forEach((child, index) => {
    if (list.children[index] !== child) list.insertBefore(child, list.children[index] ?? null);
  });
}

function entryFor(item) {
  const li = element("li", "topic");
  const [rank, name, trend] = [element("span", "rank"), element("bdi", "name"), element("span", "trend")];
  const [figure, count, error] = [element("span", "figure"), element("span", "count"), element("span", "error")];
  const [track, bar] = [element("span", "track"), element("span", "bar")];
  rank.setAttribute("aria-hidden", "true"); // the list numbers its items itself
  track.setAttribute("aria-hidden", "true");
  name.dir = "auto";
  name.textContent = name.title = item;
  figure.append(error, count);
  track.append(bar);
  li.append(rank, name, trend, figure, track);
  return { li, rank, name, trend, count, error, bar };
}

function blank(rank) {
  const li = element("li", "topic blank");
  const number = element("span", "rank");
  number.textContent = rank;
  li.setAttribute("aria-hidden", "true");
  li.append(number, element("span", "track"));
  return li;
}

function element(name, className) {
  const made = document.createElement(name);
  made.className = className;
  return made;
}
