/** Small SVG charts: a line over time, a band over time, columns. Colours and strokes are the style sheet's. */

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 1000;
const HEIGHT = 100;
const BREAK_MS = 6000;

/** A new SVG element with attributes. */
export function svgElement(name, attributes = {}) {
  const element = document.createElementNS(SVG, name);
  for (const [attribute, value] of Object.entries(attributes)) element.setAttribute(attribute, value);
  return element;
}

/** The smallest of 1, 2, 5 × 10ⁿ that is not below `value`; 1 at least. */
export function niceCeiling(value) {
  if (!(value > 1)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((m) => m * power).find((step) => step >= value * 0.999);
}

/** A chart over time, in an `<svg class="chart">`: filled below one line, or between two. */
export class TimeChart {
  #area;
  #lines;

  constructor(svg, lines = 1) {
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.setAttribute("preserveAspectRatio", "none");
    this.#area = svgElement("path", { class: "area" });
    this.#lines = Array.from({ length: lines }, (_, index) => svgElement("path", { class: `line line-${index + 1}` }));
    const middle = svgElement("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT / 2, y2: HEIGHT / 2 });
    const base = svgElement("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT });
    svg.replaceChildren(middle, base, this.#area, ...this.#lines);
  }

  /**
   * Draw one series of `[ms, value]`, or a lower and an upper one of the same times, between the times `from` and `to`,
   * 0 at the bottom and `top` at the top. Where nothing is known for `BREAK_MS` the line is broken.
   */
  draw(series, from, to, top) {
    const x = (at) => (((at - from) / (to - from)) * WIDTH).toFixed(1);
    const y = (value) => (HEIGHT - Math.min(value / top, 1.2) * HEIGHT).toFixed(2);
    const runs = series.map((points) =>
      unbroken(points.filter(([at]) => at >= from - BREAK_MS)).map((run) => run.map(([at, v]) => [x(at), y(v)])),
    );
    this.#lines.forEach((line, index) => line.setAttribute("d", runs[index].map(path).join("")));
    const areas = runs[runs.length - 1].map((upper, index) => {
      const lower = runs.length > 1 ? runs[0][index] : upper.map(([at]) => [at, HEIGHT]);
      return `${path([...upper, ...[...lower].reverse()])}Z`;
    });
    this.#area.setAttribute("d", areas.join(""));
  }
}

/** Columns, one a window, the last one set apart; places without a window stay blank. */
export class ColumnChart {
  #svg;

  constructor(svg) {
    this.#svg = svg;
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  }

  /** Draw `values` (null: nothing known) from left to right, `top` being the full height. */
  draw(values, top) {
    const step = WIDTH / values.length;
    const columns = this.#svg.children;
    while (columns.length > values.length) columns[columns.length - 1].remove();
    while (columns.length < values.length) this.#svg.append(svgElement("rect", { class: "column" }));
    values.forEach((value, index) => {
      const height = value === null ? 0 : Math.max(1.5, (value / top) * HEIGHT);
      const column = columns[index];
      column.setAttribute("x", (index * step + step * 0.14).toFixed(1));
      column.setAttribute("width", (step * 0.72).toFixed(1));
      column.setAttribute("y", (HEIGHT - height).toFixed(2));
      column.setAttribute("height", height.toFixed(2));
      column.classList.toggle("current", index === values.length - 1);
    });
  }
}

function path(points) {
  return points.length ? `M${points.join("L")}` : "";
}

function unbroken(points) {
  const runs = [];
  for (const point of points) {
    const run = runs[runs.length - 1];
    if (run === undefined || point[0] - run[run.length - 1][0] > BREAK_MS) runs.push([point]);
    else run.push(point);
  }
  return runs;
}
