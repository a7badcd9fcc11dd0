/** One view of a table, live: followed, drawn as its declaration has it, with the rows themselves below. */

import { follow } from "./follow.js";
import { Grid, PANELS } from "./panels.js";
import { el } from "./page.js";

const DRAW_MS = 200;
const WINDOWS = 60;
const NEWEST = 500; // times of rows that are not drawn over time

function times(count) {
  return count === 1 ? "once" : `${count} times`;
}

export class LiveView {
  /** The worst thing to know of the connection. */
  status;
  #host;
  #view;
  #shape;
  #chosen;
  #choose;
  #followed;
  #panel = null;
  #way = null;
  #rows = [];
  #offered = "";
  #timer = 0;
  #notice = el("p.notice", { role: "status" });
  #tools = el("div.tools");
  #drawing = el("div.drawing");
  #below = el("details.below", {}, el("summary", {}, "Rows"));
  #grid = null;
  #slow = 0; // times that the page was too slow
  #counts = el("p.counts");

  /**
   * @param {HTMLElement} host is filled
   * @param {{table: string, where?: string, select?: string}} view
   * @param {import("./shape.js").Shape} shape
   * @param {Object<string, string>} chosen by the user before: `as`, `by`, `measure`, `group`
   * @param {{choose: (choice: Object) => void, state: () => void}} on `choose` hears what the user chooses now, `state` that
   *   the status has changed
   */
  constructor(host, view, shape, chosen, { choose, state }) {
    this.#host = host;
    this.#view = view;
    this.#shape = shape;
    this.#chosen = chosen;
    this.#choose = choose;
    this.status = { state: "connecting", table: view.table };
    host.replaceChildren(this.#tools, this.#notice, this.#drawing, this.#below, this.#counts);
    this.#below.addEventListener("toggle", () => this.#draw());
    const newest = shape.ways[0] === "grid" ? NEWEST : WINDOWS;
    this.#followed = follow({ ...view, time: view.select ? undefined : shape.time, times: newest }, {
      change: (change, subscription) => this.#take(change, subscription),
      tooMany: (error) => {
        this.#refuse(error.message);
        this.#rows = error.sample;
        this.#draw(["grid"]);
      },
      state: (status) => {
        this.status = status;
        if (status.state === "refused") this.#refuse(status.detail);
        else this.#tellLag(status);
        state();
      },
    });
    this.#draw();
  }

  close() {
    this.#followed.close();
    clearTimeout(this.#timer);
  }

  #take({ rows }, subscription) {
    this.#rows = [...rows.values()];
    if (this.#shape.retyped && this.#rows.length) this.#shape = this.#shape.retyped(this.#rows);
    const { counters, position, persistent, transport } = subscription;
    const { applied, events, gaps, duplicates } = counters;
    Object.assign(this.#host.dataset, { applied, events, gaps, duplicates, position, rows: this.#rows.length, transport: transport ?? "" });
    const slow = this.#slow ? `; was too slow ${times(this.#slow)} and got only the latest of each row meanwhile` : "";
    const kept = persistent ? "a reload goes on from here" : "a reload begins anew";
    const integrity = gaps || duplicates ? `${gaps} gaps mended, ${duplicates} duplicates passed over` : "no gap, no duplicate";
    this.#counts.textContent = `${applied.toLocaleString()} changes, ${events.toLocaleString()} events; ${integrity}; ${kept}${slow}`;
    this.#timer ||= setTimeout(() => this.#draw(), DRAW_MS);
  }

  #draw(ways = this.#shape.ways) {
    clearTimeout(this.#timer);
    this.#timer = 0;
    const way = ways.includes(this.#chosen.as) ? this.#chosen.as : ways[0];
    if (way !== this.#way) {
      this.#way = way;
      this.#drawing.replaceChildren();
      this.#panel = new PANELS[way][1](this.#drawing);
      this.#host.dataset.way = way;
      this.#below.hidden = way === "grid";
    }
    const set = (choice) => {
      Object.assign(this.#chosen, choice);
      this.#choose(choice);
      this.#draw();
    };
    const shownAs = { label: "Show as", values: ways, value: way, choose: (as) => set({ as }), names: ways.map((each) => PANELS[each][0]) };
    const offered = this.#panel.show(this.#rows, this.#shape, { ...this.#chosen, set });
    this.#offer([ways.length > 1 ? shownAs : null, ...offered].filter((each) => each !== null));
    if (this.#below.open && !this.#below.hidden) {
      this.#grid ??= new Grid(this.#below);
      this.#grid.show(this.#rows, this.#shape);
    }
  }

  /** Make the choices anew only where they differ, so that one who is choosing is not disturbed. */
  #offer(choices) {
    const offered = JSON.stringify(choices);
    if (offered === this.#offered) return;
    this.#offered = offered;
    const focused = [...this.#tools.querySelectorAll("select")].indexOf(document.activeElement);
    const made = choices.map(({ label, values, value, choose, names = values }) => {
      const select = el("select", { onchange: () => choose(select.value) });
      select.append(...values.map((each, index) => el("option", { value: each, selected: each === value }, names[index])));
      return el("label.choice", {}, `${label} `, select);
    });
    this.#tools.replaceChildren(...made);
    if (focused >= 0) this.#tools.querySelectorAll("select")[focused]?.focus();
  }

  #tellLag(status) {
    const slow = status.state === "slow";
    if (slow) this.#host.dataset.slow = this.#slow += 1;
    const said = slow ? `This page is too slow: it is ${status.behind ?? "some"} messages behind and gets the latest of each row only.` : "";
    if (this.#notice.textContent !== said) this.#notice.textContent = said;
    this.#notice.className = "notice";
  }

  #refuse(text) {
    this.#notice.className = "notice bad";
    this.#notice.textContent = text;
  }
}
