/**
 * Millrace's client for browsers: subscribe to a table, keep its rows, lose nothing and apply nothing twice.
 *
 *     import { subscribe } from "./millrace.js";
 *     const topics = subscribe("ws://127.0.0.1:8400", "top_topics", {
 *       onChange: ({ rows }) => draw([...rows.values()]),
 *       onState: ({ state }) => console.log(state),
 *     });
 *
 * The protocol is docs/reference/protocol.md; docs/guide/dashboard.md tells what this module promises. No dependencies.
 */

import { Locked } from "./access.js";
import { MemoryStore, openStore } from "./store.js";

const BACKOFF_FIRST_MS = 250;
const BACKOFF_MAX_MS = 10_000;
const SILENCE_MS = 16_000; // three heartbeats of the default 5 s, and a little
const SILENCE_MAX_MS = 120_000;
const RECENT = 128; // positions remembered to recognise a message that comes again
const SKEW_SAMPLES = 24;
const CLOSE = { goingAway: 1001, tryLater: 1013, badRequest: 4400, noKey: 4401, noTable: 4404, tooSlow: 4408 };

/**
 * Begin a subscription. It reconnects until it is closed.
 *
 * @param {string} url of the server, `ws://host:port`; `http` is taken for `ws`
 * @param {string} table
 * @param {Object} [options]
 * @param {(status: Status) => void} [options.onState] called when the state or its details change
 * @param {(change: Change) => void} [options.onChange] called after rows were restored, replaced or changed
 * @param {(rows: Map<string, Object>) => Iterable<string>} [options.prune] keys of rows not worth keeping, asked after
 *   every change
 * @param {"indexeddb"|"memory"|Object} [options.store] where rows and position are kept; or an object with `load`,
 *   `save` and `persistent` as in store.js
 * @param {string} [options.where] SQL condition on rows, evaluated by the server
 * @param {string[]} [options.columns] those wanted, beside the key's
 * @param {string} [options.select] a live aggregate instead of rows, `SELECT … GROUP BY …`
 * @param {boolean} [options.conflate] the latest of each key instead of every change, when this page lags
 * @param {Object} [options.access] shows a key's ticket with each connection: an `Access` of access.js
 * @returns {Subscription}
 *
 * @typedef {Object} Status
 * @property {"connecting"|"resuming"|"snapshot"|"live"|"slow"|"reconnecting"|"missing"|"locked"|"closed"} state
 * @property {string} table
 * @property {number} [retryAt] when the next attempt begins, ms since the epoch (reconnecting, missing)
 * @property {number} [behind] messages, [behindMs] and [cutAt] with it (slow)
 * @property {string} [detail] why, in words
 *
 * @typedef {Object} Change
 * @property {"restored"|"snapshot"|"change"} type
 * @property {Map<string, Object>} rows all rows, by key; not to be altered
 * @property {Object[]} upserts
 * @property {Object[]} deletes
 * @property {string} position
 * @property {number} [events] how many events the commit added; with the last message of the commit, like the times
 * @property {number} [committedAt] ms since the epoch, the server's clock; [oldestAt], [newestAt] likewise
 * @property {boolean} [missed] the commit was made before this connection was open: it waited for us
 * @property {number} receivedAt ms since the epoch, this machine's clock
 */
export function subscribe(url, table, options = {}) {
  const subscription = new Subscription(url, table, options);
  void subscription.start();
  return subscription;
}

export class Subscription {
  table;
  /** Rows by key. @type {Map<string, Object>} */
  rows = new Map();
  /** Everything up to here has been applied. @type {string|null} */
  position = null;
  /** @type {Status} */
  status;
  /** Since the last snapshot, across reloads: `applied` changes, their `events`, `duplicates` passed over, `gaps`. */
  counters = freshCounters();

  #url;
  #options;
  #store = new MemoryStore();
  #key = [];
  #through = {};
  #recent = new Set();
  #parts = null; // rows of a snapshot that has not all come yet
  #socket = null;
  #turn = null; // of the attempt that waits for its ticket; one that is overtaken ends
  #openedAt = 0;
  #attempt = 0;
  #silenceMs = SILENCE_MS;
  #heardAt = 0;
  #skews = [];
  #suspect = { position: null, tries: 0 }; // where a heartbeat told of something lost
  #timer = 0;
  #watch = 0;
  #dirty = new Map();
  #replace = false;
  #unsaved = false;
  #saving = false;
  #wake = () => this.#onWake();

  constructor(url, table, options) {
    this.#url = url.replace(/^http/, "ws").replace(/\/+$/, "");
    this.#options = options;
    this.table = table;
    this.status = { state: "connecting", table };
  }

  /** Whether a reload will go on from where this page is. */
  get persistent() {
    return this.#store.persistent;
  }

  /** The server's clock less ours, in ms, as the heartbeats tell; 0 before the first. */
  get skew() {
    return this.#skews.length ? Math.max(...this.#skews) : 0; // the one that travelled fastest is nearest the truth
  }

  /** Take up what was saved, then connect. */
  async start() {
    globalThis.addEventListener?.("online", this.#wake);
    globalThis.document?.addEventListener("visibilitychange", this.#wake);
    await this.#restore();
    this.#watch = setInterval(() => this.#checkSilence(), 1000);
    this.#connect();
  }

  /** End the subscription; what was saved stays. */
  close() {
    globalThis.removeEventListener?.("online", this.#wake);
    globalThis.document?.removeEventListener("visibilitychange", this.#wake);
    clearInterval(this.#watch);
    clearTimeout(this.#timer);
    this.#drop();
    this.#setState({ state: "closed" });
  }

  // ---- connection

  #connect() {
    if (this.status.state === "closed") return;
    clearTimeout(this.#timer);
    this.#drop();
    this.#setState({ state: this.position === null ? "connecting" : "resuming" });
    const { access } = this.#options;
    if (access === undefined) {
      this.#open(null);
      return;
    }
    const turn = (this.#turn = {});
    access.ticket().then(
      (ticket) => {
        if (this.#turn === turn) this.#open(ticket);
      },
      (error) => {
        if (this.#turn !== turn) return;
        if (error instanceof Locked) this.#setState({ state: "locked", detail: error.message });
        else this.#retry("reconnecting", error.message, false);
      },
    );
  }

  #open(ticket) {
    const { where, columns, select, conflate } = this.#options;
    const query = new URLSearchParams({ table: this.table });
    if (where) query.set("where", where);
    if (columns?.length) query.set("columns", columns.join(","));
    if (select) query.set("select", select);
    if (conflate) query.set("conflate", "1");
    if (this.position !== null) query.set("from", this.position);
    if (ticket !== null) query.set("ticket", ticket);
    const socket = new WebSocket(`${this.#url}/v1/subscribe?${query}`);
    this.#socket = socket;
    this.#heardAt = Date.now();
    socket.onopen = () => {
      this.#openedAt = this.#heardAt = Date.now();
    };
    socket.onmessage = ({ data }) => {
      this.#heardAt = Date.now();
      this.#receive(JSON.parse(data));
    };
    socket.onclose = ({ code, reason }) => this.#onClose(code, reason);
  }

  #drop() {
    const socket = this.#socket;
    this.#turn = null;
    this.#socket = null;
    this.#parts = null;
    if (socket === null) return;
    socket.onopen = socket.onmessage = socket.onclose = null; // a dead peer may take a minute to answer the close
    socket.close();
  }

  #onClose(code, reason) {
    this.#socket = null;
    this.#parts = null;
    if (code === CLOSE.badRequest && this.position !== null) {
      this.position = null; // not a position of this lake; begin anew
    }
    if (code === CLOSE.noKey) this.#options.access?.refused();
    const patient = [CLOSE.tryLater, CLOSE.badRequest, CLOSE.noTable].includes(code);
    const state = code === CLOSE.noTable ? "missing" : "reconnecting";
    this.#retry(state, reason || `connection closed (${code})`, patient);
  }

  #retry(state, detail, patient) {
    const ceiling = Math.min(BACKOFF_MAX_MS, BACKOFF_FIRST_MS * 2 ** this.#attempt);
    const pause = (patient ? BACKOFF_MAX_MS / 2 : ceiling) * (0.5 + Math.random() / 2);
    this.#attempt += 1;
    this.#setState({ state, detail, retryAt: Date.now() + pause });
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#connect(), pause);
  }

  #checkSilence() {
    if (this.#socket === null || Date.now() - this.#heardAt < this.#silenceMs) return;
    this.#drop();
    this.#silenceMs = Math.min(SILENCE_MAX_MS, this.#silenceMs * 2); // its heartbeats may be slower than we think
    this.#retry("reconnecting", "nothing heard from the server", false);
  }

  #onWake() {
    if (this.#socket !== null) this.#checkSilence();
    else if (this.status.state === "reconnecting" && globalThis.document?.visibilityState !== "hidden") this.#connect();
  }

  #setState(status) {
    this.status = { ...status, table: this.table };
    this.#options.onState?.(this.status);
  }

  // ---- messages

  #receive(message) {
    switch (message.type) {
      case "snapshot":
        return this.#onSnapshot(message);
      case "change":
        return this.#onChange(message);
      case "resumed":
        return this.#onResumed(message);
      case "heartbeat":
        return this.#onHeartbeat(message);
      case "slow":
        return this.#setState({
          state: "slow",
          behind: message.behind,
          behindMs: message.behind_ms,
          cutAt: Date.now() + message.cut_in_ms,
        });
      case "expired":
        return this.#setState({ state: "snapshot", detail: message.detail ?? message.reason });
      case "error":
        return this.#setState({ ...this.status, detail: message.detail ?? message.code });
      default: // a later server may say more than we know
    }
  }

  #onSnapshot(message) {
    if (message.first || this.#parts === null) {
      this.#parts = [];
      this.#setState({ state: "snapshot" });
    }
    this.#parts.push(...message.rows);
    if (!message.last) return;
    this.#key = message.key;
    this.rows = new Map(this.#parts.map((row) => [this.#keyOf(row), row]));
    this.#parts = null;
    this.#through = message.through ?? {};
    this.#recent = new Set();
    this.counters = freshCounters();
    this.#moveTo(message.position);
    this.#replace = true;
    this.#dirty = new Map(this.rows);
    this.#finish({ type: "snapshot", message, upserts: [...this.rows.values()], deletes: [] });
    this.#goLive();
  }

  #onChange(message) {
    if (this.#recent.has(message.position)) {
      this.counters.duplicates += 1;
      this.#save();
      return;
    }
    if (message.after !== undefined && message.after !== this.position) {
      this.counters.gaps += 1; // what lies between is asked for again, from where we are
      this.#connect();
      return;
    }
    if (goesBack(this.#through, message.through ?? {})) this.counters.gaps += 1;
    for (const row of message.upserts) this.#put(this.#keyOf(row), row);
    for (const row of message.deletes) this.#put(this.#keyOf(row), null);
    this.#through = { ...this.#through, ...message.through };
    this.counters.applied += 1;
    if (message.last !== false) this.counters.events += message.events ?? 0; // a part of a large commit repeats them
    this.#moveTo(message.position);
    this.#finish({ type: "change", message, upserts: message.upserts, deletes: message.deletes });
    if (this.status.state === "resuming") this.#goLive();
  }

  #onResumed(message) {
    if (message.position !== this.position) this.counters.gaps += 1;
    this.#key = message.key;
    this.#goLive();
  }

  #onHeartbeat(message) {
    this.#skews = [...this.#skews, message.at - Date.now()].slice(-SKEW_SAMPLES);
    if (message.behind > 0) return;
    if (this.status.state === "slow") this.#goLive();
    const settled = this.#parts === null && this.position !== null;
    if (settled && message.position !== this.position) this.#mend(message.position);
  }

  /** Nothing is under way, yet the server is elsewhere: something was lost. Ask again from where we are; then anew. */
  #mend(theirs) {
    const again = this.#suspect.position === theirs;
    this.#suspect = { position: theirs, tries: again ? this.#suspect.tries + 1 : 1 };
    if (!again) this.counters.gaps += 1;
    if (this.#suspect.tries === 2) this.position = null; // a snapshot
    if (this.#suspect.tries <= 2) this.#connect();
  }

  #goLive() {
    this.#attempt = 0;
    this.#setState({ state: "live" });
  }

  #moveTo(position) {
    this.position = position;
    this.#recent.add(position);
    if (this.#recent.size > RECENT) this.#recent.delete(this.#recent.values().next().value);
  }

  #finish({ type, message, upserts, deletes }) {
    for (const key of this.#options.prune?.(this.rows) ?? []) this.#put(key, null);
    this.#save();
    const committedAt = message.committed_at;
    const whole = message.last !== false;
    this.#options.onChange?.({
      type,
      rows: this.rows,
      upserts,
      deletes,
      position: this.position,
      events: whole ? message.events : undefined,
      committedAt,
      oldestAt: whole ? message.oldest_at : undefined,
      newestAt: whole ? message.newest_at : undefined,
      missed: committedAt !== undefined && committedAt < this.#openedAt + this.skew,
      receivedAt: this.#heardAt,
    });
  }

  #keyOf(row) {
    return JSON.stringify(this.#key.map((column) => row[column]));
  }

  #put(key, row) {
    if (row === null) this.rows.delete(key);
    else this.rows.set(key, row);
    this.#dirty.set(key, row);
  }

  // ---- what survives a reload

  /** Rows of another filter are another thing. */
  #storeName() {
    const { where, columns, select } = this.#options;
    const view = where || columns?.length || select ? `|${JSON.stringify([where, columns, select])}` : "";
    return `${this.#url}|${this.table}${view}`;
  }

  async #restore() {
    const { store = "indexeddb" } = this.#options;
    if (typeof store === "object") this.#store = store;
    else if (store === "indexeddb") this.#store = await openStore(this.#storeName());
    try {
      const { rows, head } = await this.#store.load();
      if (head === null) return;
      this.rows = new Map(rows);
      this.position = head.position;
      this.#key = head.key;
      this.#through = head.through;
      this.#recent = new Set(head.recent);
      this.counters = { ...freshCounters(), ...head.counters };
    } catch {
      this.#store = new MemoryStore();
      return;
    }
    const { rows, position } = this;
    this.#options.onChange?.({ type: "restored", rows, upserts: [], deletes: [], position, receivedAt: Date.now() });
  }

  #save() {
    this.#unsaved = true;
    if (!this.#saving) void this.#saveAll();
  }

  /** One transaction at a time; what comes meanwhile goes into the next, rows and position together. */
  async #saveAll() {
    this.#saving = true;
    while (this.#unsaved) {
      const batch = { replace: this.#replace, rows: this.#dirty, head: this.#head() };
      this.#dirty = new Map();
      this.#replace = this.#unsaved = false;
      const written = await this.#store.save(batch).catch(() => false);
      if (!written) this.#store = new MemoryStore(); // what is stored stays as it is: older, but whole
    }
    this.#saving = false;
  }

  #head() {
    return {
      position: this.position,
      key: this.#key,
      through: this.#through,
      recent: [...this.#recent],
      counters: { ...this.counters },
    };
  }
}

function freshCounters() {
  return { applied: 0, events: 0, duplicates: 0, gaps: 0 };
}

function goesBack(before, after) {
  return Object.entries(after).some(([partition, offset]) => offset < (before[partition] ?? 0));
}
