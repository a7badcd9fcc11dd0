/** Charts over time, drawn by uPlot (vendor/uplot). Colours are the style sheet's, so they follow the theme. */

const uPlot = globalThis.uPlot;
const SMALL = 11; // px, of the labels of axes
const DAY_S = 86_400;
const compact = new Intl.NumberFormat(undefined, { notation: "compact", maximumSignificantDigits: 3 });

const moments = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
const formats = [
  [60, new Intl.DateTimeFormat(undefined, { ...moments, second: "2-digit" })],
  [DAY_S, new Intl.DateTimeFormat(undefined, moments)],
  [Infinity, new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short" })],
];

/** How many colours of series there are: `--s1` to `--s8`; the last is for what is left over. */
export const COLOURS = 8;

const probe = document.createElement("i");
probe.hidden = true;
document.body.append(probe);

/** What a custom property of the style sheet is in the present theme. */
function colour(name, opacity = 1) {
  probe.style.color = `color-mix(in srgb, var(--${name}) ${opacity * 100}%, transparent)`;
  return getComputedStyle(probe).color;
}

/**
 * One chart in an element that has a size. What is drawn has to be said elsewhere for those who do not see it.
 *
 * @typedef {Object} Series
 * @property {(number|null)[]} values one for each time; null: nothing known
 * @property {string} colour name of a custom property
 * @property {"line"|"bar"} [style] a line unless said; bars of several series are stacked, the first one lowest
 * @property {boolean} [fill] fill below the line
 * @property {(number|null)[]} [low] with `high`: an error bar around each value
 * @property {(number|null)[]} [high]
 */
export class Chart {
  #host;
  #onPoint;
  #plain;
  #plot = null;
  #built = "";
  #series = [];
  #data = [[]];
  #frame = {};

  /**
   * @param {HTMLElement} host
   * @param {{onPoint?: (index: number|null) => void, plain?: boolean}} [options] `onPoint` hears which time is pointed at;
   *   `plain` leaves out the axes
   */
  constructor(host, { onPoint, plain = false } = {}) {
    this.#host = host;
    this.#onPoint = onPoint;
    this.#plain = plain;
    new ResizeObserver(() => this.#plot?.setSize(this.#size())).observe(host);
    addEventListener("themechange", () => this.#plot?.redraw(false));
  }

  /**
   * @param {number[]} times ms since the epoch, ascending
   * @param {Series[]} series
   * @param {{from?: number, to?: number, top?: number}} [frame] of the times (ms) and values shown; else all of them
   */
  show(times, series, frame = {}) {
    this.#frame = frame;
    this.#series = series;
    this.#data = [times.map((at) => at / 1000), ...(series[0]?.style === "bar" ? stacked(series) : series.map(({ values }) => values))];
    const built = JSON.stringify(series.map(({ colour: name, style, fill }) => [name, style, fill]));
    if (this.#plot === null || built !== this.#built) {
      this.#plot?.destroy();
      this.#built = built;
      this.#plot = new uPlot(this.#options(), this.#data, this.#host);
    } else {
      this.#plot.setData(this.#data);
    }
  }

  #size() {
    return { width: Math.max(40, this.#host.clientWidth), height: Math.max(20, this.#host.clientHeight) };
  }

  #options() {
    const bars = this.#series[0]?.style === "bar";
    const shown = this.#series.map((one) => ({
      stroke: () => (bars ? "transparent" : colour(one.colour)),
      width: bars ? 0 : 2,
      fill: bars || one.fill ? () => colour(one.colour, bars ? 1 : 0.16) : undefined,
      paths: bars ? uPlot.paths.bars({ size: [0.82, 64] }) : undefined,
      points: { show: !bars && !this.#plain && this.#data[0].length < 90, size: 5, fill: () => colour(one.colour) },
      spanGaps: false,
    }));
    const axis = {
      show: !this.#plain,
      stroke: () => colour("muted"),
      font: `${SMALL}px system-ui, sans-serif`,
      grid: { stroke: () => colour("rule"), width: 1 },
      ticks: { show: false },
    };
    const times = (_, splits, __, ___, step) => splits.map((at) => formats.find(([below]) => step < below)[1].format(at * 1000));
    const values = (_, splits) => splits.map((value) => (value === null ? "" : compact.format(value)));
    return {
      ...this.#size(),
      padding: this.#plain ? [2, 0, 2, 0] : [10, 12, 0, 0],
      legend: { show: false },
      cursor: { show: !this.#plain, drag: { x: false, y: false }, y: false, points: { show: !bars } },
      scales: { x: { range: (_, least, most) => this.#times(least, most, bars) }, y: { range: (_, least, most) => this.#values(least, most) } },
      axes: [{ ...axis, size: 30, values: times }, { ...axis, size: 46, values }],
      series: [{}, ...(bars ? shown.reverse() : shown)],
      hooks: {
        draw: [(plot) => this.#drawErrors(plot)],
        setCursor: [(plot) => this.#onPoint?.(plot.cursor.idx ?? null)],
      },
    };
  }

  #times(least, most, bars) {
    if (this.#frame.from !== undefined) return [this.#frame.from / 1000, this.#frame.to / 1000];
    const times = this.#data[0];
    const step = times.length > 1 ? (most - least) / (times.length - 1) : 60;
    const room = bars || least === most ? step * 0.6 : step * 0.15;
    return [least - room, most + room];
  }

  #values(least, most) {
    const highest = Math.max(most ?? 0, ...this.#series.flatMap(({ high = [] }) => high));
    return [Math.min(0, least ?? 0), this.#frame.top ?? (highest > 0 ? highest * 1.08 : 1)];
  }

  #drawErrors(plot) {
    for (const { low, high, colour: name } of this.#series) {
      if (low === undefined) continue;
      const cap = 4 * devicePixelRatio;
      plot.ctx.save();
      plot.ctx.strokeStyle = colour(name, 0.75);
      plot.ctx.lineWidth = 1.5 * devicePixelRatio;
      plot.ctx.beginPath();
      this.#data[0].forEach((at, index) => {
        if (low[index] === null || high[index] === null) return;
        const x = plot.valToPos(at, "x", true);
        const [bottom, top] = [low[index], high[index]].map((value) => plot.valToPos(value, "y", true));
        for (const y of [bottom, top]) {
          plot.ctx.moveTo(x - cap, y);
          plot.ctx.lineTo(x + cap, y);
        }
        plot.ctx.moveTo(x, bottom);
        plot.ctx.lineTo(x, top);
      });
      plot.ctx.stroke();
      plot.ctx.restore();
    }
  }
}

/** Sums up to each series, the largest first: each bar is drawn over the higher ones behind it. */
function stacked(series) {
  const sums = [];
  series.forEach(({ values }, at) => sums.push(values.map((value, index) => (value ?? 0) + (at ? sums[at - 1][index] : 0))));
  return sums.reverse();
}
