/**
 * Millrace's client for browsers: subscribe to a table, keep its rows, lose nothing and apply nothing twice.
 *
 *     import { subscribe } from "/client/millrace.js";
 *     const topics = subscribe("http://127.0.0.1:8400", "top_topics", {
 *       onChange: ({ rows }) => draw([...rows.values()]),
 *       onState: ({ state }) => console.log(state),
 *     });
 *
 * Types and the meaning of every field: millrace.d.ts; how to use it: docs/guide/clients.md.
 *
 * It tries WebSocket, then SSE, then long polling, and reconnects until it is closed or the server gives a final answer: state
 * `locked` (a key is needed), or `refused` with the `code` of docs/reference/protocol.md. No dependencies, no build step.
 */

import { Access, Locked } from "./access.js";
import { MemoryStore, openStore } from "./store.js";
import { Tabs } from "./tabs.js";
import { Blocked, Lost, receive, Refused, TRANSPORTS } from "./transports.js";

export { Access, Locked };

const BACKOFF_FIRST_MS = 250;
const BACKOFF_MAX_MS = 10_000;
const SILENCE_MS = 16_000; // three heartbeats of the default 5 s, and a little
const SILENCE_MAX_MS = 120_000;
const STUBBORN = 3; // a transport that worked gives way only when it is blocked this often in a row
const LATE_MS = 2_000; // a tab that hears of a change so long after the leader is slow
const RECENT = 128; // positions remembered to recognise a message that comes again
const SKEW_SAMPLES = 24;
const FINAL_STATES = ["closed", "locked", "refused"];

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

  /** The transport in use, or tried. @type {"websocket"|"sse"|"poll"} */
  transport;
  /** Age of the newest event in the table as of the last heartbeat, ms; null if unknown. */
  lagMs = null;
  /** Messages that the server counts as not yet processed here. */
  behind = 0;
  /** Whether a reload will go on from where this page is. */
  persistent = false;

  #base;
  #options;
  #access;
  #transports;
  #store = new MemoryStore();
  #tabs = null;
  #key = [];
  #through = {};
  #recent = new Set();
  #parts = null; // rows of a snapshot that has not all come yet
  #turn = null; // aborts the connection; null between two
  #came = false; // whether a message has come on it
  #worked = null; // the transport that brought messages last
  #blocked = 0; // attempts that were blocked, in a row
  #tried = 0; // transports given up since a message came
  #openedAt = 0;
  #attempt = 0;
  #silenceMs = SILENCE_MS;
  #heardAt = 0;
  #skews = [];
  #suspect = { theirs: null, ours: null }; // positions as of the last heartbeat
  #mended = { position: null, tries: 0 }; // where something was lost
  #timer = 0;
  #watch = 0;
  #dirty = new Map();
  #replace = false;
  #unsaved = false;
  #saving = false;
  #wake = () => this.#onWake();

  constructor(url, table, options) {
    const { key, tickets, access, transport = "auto" } = options;
    if (transport !== "auto" && !TRANSPORTS.includes(transport)) throw new TypeError(`${transport} is no transport`);
    this.#base = url.replace(/^ws/, "http").replace(/\/+$/, "");
    this.#options = options;
    this.#access = access ?? new Access(this.#base, key, tickets);
    this.#transports = transport === "auto" ? TRANSPORTS : [transport];
    this.transport = this.#transports[0];
    this.table = table;
    this.status = { state: "connecting", table };
  }

  /** Whether this tab has the connection, rather than another one that shows the same. */
  get leads() {
    return this.#tabs?.leads ?? false;
  }

  /** The server's clock less ours, in ms, as the heartbeats tell; 0 before the first. */
  get skew() {
    return this.#skews.length ? Math.max(...this.#skews) : 0; // the one that travelled fastest is nearest the truth
  }

  /** Take up what was saved or what another tab has, then connect. */
  async start() {
    globalThis.addEventListener?.("online", this.#wake);
    globalThis.document?.addEventListener("visibilitychange", this.#wake);
    this.#watch = setInterval(() => this.#onSecond(), 1000);
    const scope = this.#options.share === false ? null : await this.#access.scope().catch(() => null);
    if (this.#ended) return;
    this.#tabs = new Tabs(scope === null ? null : `millrace|${this.#storeName()}|${scope}`, {
      lead: () => void this.#lead(),
      told: (news) => this.#told(news),
      state: () => ({ rows: this.rows, ...this.#news() }),
      wake: () => this.#onWake(),
    });
    this.#tabs.join();
  }

  /** End the subscription; what was saved stays. */
  close() {
    this.#tabs?.leave(); // the others go on
    this.#end({ state: "closed" });
  }

  // ---- connection

  get #ended() {
    return FINAL_STATES.includes(this.status.state);
  }

  async #lead() {
    await this.#restore();
    this.#connect();
  }

  #connect() {
    if (this.#ended) return;
    clearTimeout(this.#timer);
    this.#drop();
    this.#setState({ state: this.position === null ? "connecting" : "resuming" });
    const { where, columns, select, conflate } = this.#options;
    const asked = { table: this.table, where, columns: columns?.join(","), select, conflate: conflate && "1", from: this.position };
    const turn = (this.#turn = new AbortController());
    const request = {
      base: this.#base,
      query: Object.fromEntries(Object.entries(asked).filter(([, value]) => value)),
      access: this.#access,
      processed: () => this.position,
    };
    this.#came = false;
    this.#heardAt = Date.now();
    const heard = (message) => {
      if (!turn.signal.aborted) this.#receive(message);
    };
    receive(this.transport, request, heard, turn.signal).catch((error) => {
      if (!turn.signal.aborted) this.#lost(error);
    });
  }

  #drop() {
    this.#turn?.abort();
    this.#turn = null;
    this.#parts = null;
  }

  /** The connection has ended, or came to nothing. */
  #lost(error) {
    this.#drop();
    if (error instanceof Refused && error.code === "bad_position" && this.position !== null) {
      this.position = null; // not a position of this lake; begin anew
    } else if (error instanceof Locked || (error instanceof Refused && error.code === "unauthorized")) {
      this.#access.refused();
      this.#end({ state: "locked", detail: error.message });
      return;
    } else if (error instanceof Refused && error.code === "no_such_table" && this.#options.waitForTable) {
      this.#retry("missing", error.message);
      return;
    } else if (error instanceof Refused) {
      this.#end({ state: "refused", code: error.code, detail: error.message });
      return;
    } else if (error instanceof Blocked) {
      this.#blocked += 1;
      if (this.transport !== this.#worked || this.#blocked >= STUBBORN) {
        this.transport = this.#transports[(this.#transports.indexOf(this.transport) + 1) % this.#transports.length];
        this.#tried += 1;
        if (this.#tried < this.#transports.length) {
          this.#connect();
          return;
        }
        this.#tried = 0;
        if (error.status >= 400 && error.status < 500) {
          this.#end({ state: "refused", code: `http_${error.status}`, detail: error.message });
          return;
        }
      }
    } else {
      this.transport = this.#worked ?? this.transport; // nothing answers: this says nothing about the transport
    }
    this.#retry("reconnecting", error.message);
  }

  #retry(state, detail) {
    const pause = Math.min(BACKOFF_MAX_MS, BACKOFF_FIRST_MS * 2 ** this.#attempt) * (0.5 + Math.random() / 2);
    this.#attempt += 1;
    this.#setState({ state, detail, retryAt: Date.now() + pause });
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#connect(), pause);
  }

  #end(status) {
    globalThis.removeEventListener?.("online", this.#wake);
    globalThis.document?.removeEventListener("visibilitychange", this.#wake);
    clearInterval(this.#watch);
    clearTimeout(this.#timer);
    this.#drop();
    this.#setState(status);
    this.#tabs?.leave();
  }

  #onSecond() {
    if (this.leads) this.#checkSilence();
    else if (this.status.state === "reconnecting" && Date.now() > this.status.retryAt + 1_000) this.#tabs?.wake();
  }

  #checkSilence() {
    if (this.#turn === null || Date.now() - this.#heardAt < this.#silenceMs) return;
    this.#silenceMs = Math.min(SILENCE_MAX_MS, this.#silenceMs * 2); // its heartbeats may be slower than we think
    const detail = "nothing heard from the server";
    this.#lost(this.#came ? new Lost(detail) : new Blocked(detail));
  }

  #onWake() {
    if (!this.leads) this.#tabs?.wake(); // its timers may sleep while it is hidden
    else if (this.#turn !== null) this.#checkSilence();
    else if (this.status.state === "reconnecting") this.#connect();
  }

  #setState(status) {
    this.status = { ...status, table: this.table };
    this.#tabs?.tell(this.#news());
    this.#call("onState", this.status);
  }

  /** A fault in the application's own function is the application's. */
  #call(name, ...given) {
    try {
      this.#options[name]?.(...given);
    } catch (error) {
      reportError(error);
    }
  }

  // ---- tabs

  /** What the leader tells the others beside rows. */
  #news() {
    const { status, transport, lagMs, behind, persistent } = this;
    return { shown: { status, transport, lagMs, behind, persistent }, skews: this.#skews, head: this.#head() };
  }

  /** The leader told its whole state, a change, or how it is. */
  #told({ rows, change, before, shown, skews, head, at }) {
    const { status, ...facts } = shown;
    Object.assign(this, facts);
    this.#skews = skews;
    this.#heardAt = at;
    if (rows !== undefined && head.position !== null) {
      this.rows = rows;
      this.#take(head);
      this.#changed({ type: "restored", upserts: [], deletes: [] });
    } else if (change !== undefined && before === this.position) {
      this.#take(head);
      this.#apply(change);
      this.#changed(change);
    } else if (head.position !== null && head.position !== this.position) {
      this.#tabs.ask(); // a snapshot has come, or we have missed something: the whole state
    }
    if (FINAL_STATES.includes(status.state)) {
      this.#end(status);
      return;
    }
    const late = Date.now() - at;
    this.#setState(late < LATE_MS || status.state !== "live" ? status : { ...status, state: "slow", behindMs: late });
  }

  // ---- messages

  #receive(message) {
    this.#heardAt = Date.now();
    if (!this.#came) {
      this.#came = true;
      this.#worked = this.transport;
      this.#blocked = this.#tried = 0;
      this.#openedAt = this.#heardAt;
    }
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
        this.behind = message.behind;
        return this.#setState({
          state: "slow",
          behind: message.behind,
          behindMs: message.behind_ms,
          cutAt: Date.now() + message.cut_in_ms,
        });
      case "expired":
        return this.#setState({ state: "snapshot", detail: message.detail ?? message.reason });
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
    const upserts = this.#parts;
    this.#parts = null;
    this.rows = new Map();
    this.#dirty = new Map();
    this.#replace = true;
    this.#through = message.through ?? {};
    this.#recent = new Set();
    this.counters = freshCounters();
    this.#finish({ type: "snapshot", upserts, deletes: [] }, message);
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
    this.#through = { ...this.#through, ...message.through };
    this.counters.applied += 1;
    if (message.last !== false) this.counters.events += message.events ?? 0; // a part of a large commit repeats them
    this.#finish({ type: "change", upserts: message.upserts, deletes: message.deletes }, message);
    if (this.status.state === "resuming") this.#goLive();
  }

  #onResumed(message) {
    if (message.position !== this.position) this.counters.gaps += 1;
    this.#key = message.key;
    this.#goLive();
  }

  #onHeartbeat(message) {
    this.behind = message.behind;
    if (message.at === undefined) return; // of an answer to a poll that brought changes
    this.#skews = [...this.#skews, message.at - Date.now()].slice(-SKEW_SAMPLES);
    this.lagMs = message.lag_ms;
    const { theirs, ours } = this.#suspect;
    this.#suspect = { ...this.#suspect, theirs: message.position, ours: this.position };
    const caughtUp = message.position === this.position;
    if (caughtUp && this.status.state !== "live") this.#goLive();
    else this.#tabs.tell(this.#news());
    if (caughtUp || this.#parts !== null || this.position === null) return;
    // The last changes may be unacknowledged, or held back because we are slow. Told twice, they are lost.
    if (message.behind === 0 || (theirs === message.position && ours === this.position)) this.#mend(message.position);
  }

  /** Nothing is under way, yet the server is elsewhere: something was lost. Ask again from where we are; then anew. */
  #mend(theirs) {
    const again = this.#mended.position === theirs;
    this.#mended = { position: theirs, tries: again ? this.#mended.tries + 1 : 1 };
    if (!again) this.counters.gaps += 1;
    if (this.#mended.tries === 2) this.position = null; // a snapshot
    if (this.#mended.tries <= 2) this.#connect();
  }

  #goLive() {
    this.#attempt = 0;
    this.#setState({ state: "live" });
  }

  /** Apply rows that a message brought, store them with its position, and tell everybody. */
  #finish(rows, message) {
    const whole = message.last !== false;
    const before = this.position;
    const committedAt = message.committed_at;
    const change = {
      ...rows,
      events: whole ? message.events : undefined,
      committedAt,
      oldestAt: whole ? message.oldest_at : undefined,
      newestAt: whole ? message.newest_at : undefined,
      missed: committedAt !== undefined && committedAt < this.#openedAt + this.skew,
    };
    this.#apply(change);
    this.position = message.position;
    this.#recent.add(message.position);
    if (this.#recent.size > RECENT) this.#recent.delete(this.#recent.values().next().value);
    this.#tabs.tell(change.type === "snapshot" ? this.#news() : { change, before, ...this.#news() });
    this.#save();
    this.#changed(change);
  }

  #apply({ upserts, deletes }) {
    for (const row of upserts) this.#put(this.#keyOf(row), row);
    for (const row of deletes) this.#put(this.#keyOf(row), null);
    for (const key of this.#options.prune?.(this.rows) ?? []) this.#put(key, null);
  }

  #changed(change) {
    const { rows, position } = this;
    this.#call("onChange", { ...change, rows, position, receivedAt: this.#heardAt });
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

  /** Names what is shown. Rows of another filter, or fewer of them, are another thing. */
  #storeName() {
    const { where, columns, select, prune } = this.#options;
    const view = where || columns?.length || select ? `|${JSON.stringify([where, columns, select])}` : "";
    const pruned = prune === undefined ? "" : `|pruned by ${globalThis.location?.pathname}`;
    return `${this.#base}|${this.table}${view}${pruned}`;
  }

  /** Take up what was saved. A tab that has rows already, from the leader before, writes them instead. */
  async #restore() {
    const { store = this.#access.keyed ? "memory" : "indexeddb" } = this.#options;
    if (typeof store === "object") this.#store = store;
    else if (store === "indexeddb") this.#store = await openStore(this.#storeName());
    this.persistent = this.#store.persistent;
    let saved;
    try {
      saved = await this.#store.load();
    } catch {
      this.#forget();
      return;
    }
    if (this.position !== null) {
      this.#dirty = new Map(this.rows);
      this.#replace = true;
      this.#save();
    } else if (saved.head !== null) {
      this.rows = new Map(saved.rows);
      this.#take(saved.head);
      this.#heardAt = Date.now();
      this.#changed({ type: "restored", upserts: [], deletes: [] });
    }
  }

  #forget() {
    this.#store = new MemoryStore(); // what is stored stays as it is: older, but whole
    this.persistent = false;
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
      if (!written) this.#forget();
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

  #take(head) {
    this.position = head.position;
    this.#key = head.key;
    this.#through = head.through;
    this.#recent = new Set(head.recent);
    this.counters = { ...freshCounters(), ...head.counters };
    this.#dirty = new Map(); // a tab that follows stores nothing
  }
}

function freshCounters() {
  return { applied: 0, events: 0, duplicates: 0, gaps: 0 };
}

function goesBack(before, after) {
  return Object.entries(after).some(([partition, offset]) => offset < (before[partition] ?? 0));
}
