/** What the changes of a table tell about the stream: events per second, and how old they are when they arrive. */

const SMOOTH_S = 5;
const SPREAD_MAX_S = 3; // a commit after a silence was filled in its last moments, not during the silence

/** Events per second, from how many events each commit added and when it was made. */
export class Throughput {
  #perSecond = new Map(); // whole second -> events
  #keepS;
  #last = null;

  constructor(keepS, saved) {
    this.#keepS = keepS;
    if (saved) [this.#perSecond, this.#last] = [new Map(saved.perSecond), saved.last];
  }

  /** A commit at `at` (ms, server's clock) added `events`: spread them over the time since the commit before. */
  add(at, events) {
    const end = at / 1000;
    const start = Math.max(end - SPREAD_MAX_S, Math.min(this.#last ?? end - 1, end - 0.05));
    for (let second = Math.floor(start); second < end; second += 1) {
      const share = (Math.min(second + 1, end) - Math.max(second, start)) / (end - start);
      this.#perSecond.set(second, (this.#perSecond.get(second) ?? 0) + events * share);
    }
    this.#last = Math.max(end, this.#last ?? 0);
    for (const second of this.#perSecond.keys()) {
      if (second < end - this.#keepS) this.#perSecond.delete(second);
    }
  }

  /** `[ms, events/s]` for each second from `from` to `now` (ms) that is settled, averaged over five seconds. */
  points(from, now) {
    if (this.#last === null || this.#perSecond.size === 0) return [];
    const known = Math.min(...this.#perSecond.keys());
    const first = Math.max(Math.floor(from / 1000), known);
    const settled = Math.max(Math.floor(this.#last) - 1, Math.floor(now / 1000) - 4);
    const points = [];
    for (let second = first; second <= settled; second += 1) {
      const start = Math.max(known, second - SMOOTH_S + 1);
      let sum = 0;
      for (let s = start; s <= second; s += 1) sum += this.#perSecond.get(s) ?? 0;
      points.push([(second + 1) * 1000, sum / (second - start + 1)]);
    }
    return points;
  }

  saved() {
    return { perSecond: [...this.#perSecond], last: this.#last };
  }
}

/** Milliseconds from receipt by a collector to this page, for the newest and the oldest event of each commit. */
export class Latency {
  #samples; // {at, newest, oldest}: as this machine's clock has it, before the correction
  #keepMs;

  constructor(keepS, saved) {
    this.#keepMs = keepS * 1000;
    this.#samples = saved?.samples ?? [];
  }

  /** A commit came at `receivedAt` (ms, this clock) with events received at `oldestAt` … `newestAt` (their clock). */
  add(receivedAt, oldestAt, newestAt) {
    this.#samples.push({ at: receivedAt, newest: receivedAt - newestAt, oldest: receivedAt - oldestAt });
    while (this.#samples[0].at < receivedAt - this.#keepMs) this.#samples.shift();
  }

  /** `{newest, oldest}`, each `[ms, ms]`, times on the server's clock, which is `skew` ms ahead of this one. */
  points(skew) {
    const shift = (field) => this.#samples.map((s) => [s.at + skew, Math.max(0, s[field] + skew)]);
    return { newest: shift("newest"), oldest: shift("oldest") };
  }

  saved() {
    return { samples: this.#samples };
  }
}

/** The middle value of the last `count` points, or null. */
export function medianOfLast(points, count) {
  const values = points.slice(-count).map(([, value]) => value);
  values.sort((a, b) => a - b);
  return values.length ? values[Math.floor(values.length / 2)] : null;
}

/** The smallest of 1, 1.5, 2, 3, 4, 5, 6, 8, 10 × 10ⁿ that is not below `value`; 1 at least. */
export function niceCeiling(value) {
  if (!(value > 1)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((m) => m * power).find((step) => step >= value * 0.999);
}
