/** Types of Millrace's client for browsers. */

export type Row = Readonly<Record<string, unknown>>;

/**
 * - `connecting`, `resuming`: on the way, without and with a position to go on from
 * - `snapshot`: all rows are on their way
 * - `live`: every change comes as it is made
 * - `slow`: the server, or the tab that has the connection, says that this one is too slow: `behind`, `behindMs`, `cutAt`
 * - `reconnecting`: until `retryAt`; `missing`: the same, because there is no such table yet (`waitForTable`)
 * - `locked`: a key is needed, or this one is not good any more; `refused`: another final answer of the server, see `code`;
 *   `closed`. These three are final.
 */
export type State =
  | "connecting"
  | "resuming"
  | "snapshot"
  | "live"
  | "slow"
  | "reconnecting"
  | "missing"
  | "locked"
  | "refused"
  | "closed";

export interface Status {
  readonly state: State;
  readonly table: string;
  /** Why, in words. */
  readonly detail?: string;
  /** Of a refusal, as in docs/reference/protocol.md: `no_such_table`, `bad_filter`, `forbidden`, … */
  readonly code?: string;
  /** When the next attempt begins, ms since the epoch. */
  readonly retryAt?: number;
  /** Messages that this tab is behind. */
  readonly behind?: number;
  /** Age of the oldest of them, ms. */
  readonly behindMs?: number;
  /** When the server ends a connection that takes nothing, ms since the epoch. */
  readonly cutAt?: number;
}

export interface Change {
  /** `restored`: the rows that were stored, or that another tab has; `snapshot`: all rows, anew; `change`: of one commit. */
  readonly type: "restored" | "snapshot" | "change";
  /** All rows after it, by key. Do not alter it. */
  readonly rows: ReadonlyMap<string, Row>;
  readonly upserts: readonly Row[];
  /** The key columns of rows that are gone. */
  readonly deletes: readonly Row[];
  readonly position: string;
  /** Events that the commit added; comes with the last message of a commit, as the times do. */
  readonly events?: number;
  /** ms since the epoch by the server's clock, as `oldestAt` and `newestAt`: when a collector had those events. */
  readonly committedAt?: number;
  readonly oldestAt?: number;
  readonly newestAt?: number;
  /** Whether the commit was made before this connection was open. */
  readonly missed?: boolean;
  /** ms since the epoch by this machine's clock. */
  readonly receivedAt: number;
}

export interface Counters {
  /** Changes since the last snapshot, across reloads. */
  readonly applied: number;
  readonly events: number;
  /** Changes that came again and were passed over. */
  readonly duplicates: number;
  /** Changes that were missing and were asked for again. */
  readonly gaps: number;
}

/** Where rows and position are kept. `save` writes both or neither; false: another page stores this subscription now. */
export interface Store {
  readonly persistent: boolean;
  load(): Promise<{ rows: [string, Row][]; head: object | null }>;
  save(batch: { replace: boolean; rows: Map<string, Row | null>; head: object }): Promise<boolean>;
}

export interface Options {
  /** Called after rows were restored, replaced or changed. */
  onChange?(change: Change): void;
  /** Called when the status changes. */
  onState?(status: Status): void;
  /** Condition on rows, evaluated by the server. */
  where?: string;
  /** Columns wanted beside the key's. */
  columns?: readonly string[];
  /** A live aggregate instead of rows, `SELECT … GROUP BY …`. */
  select?: string;
  /** When this page lags, the latest of each key instead of every change. */
  conflate?: boolean;
  /** API key. */
  key?: string;
  /** Instead of `key`, where the page must not have it: fetches a ticket (`POST /v1/tickets`) for each request. */
  tickets?(): Promise<string>;
  /** Instead of `key`: the key of the tab. */
  access?: Access;
  /** `auto`, the default, takes the first that gets through. */
  transport?: "auto" | "websocket" | "sse" | "poll";
  /** Wait for a table that does not exist; else that is final. */
  waitForTable?: boolean;
  /** Default: `indexeddb`; with a key `memory`, so that rows behind a key do not stay in the browser. */
  store?: "indexeddb" | "memory" | Store;
  /** Whether tabs that show the same share one connection. Default: true. */
  share?: boolean;
  /** Keys of rows that are not worth keeping, asked after every change. */
  prune?(rows: ReadonlyMap<string, Row>): Iterable<string>;
}

/** Begin a subscription. `url` is the server's: `https://…` or `http://…`; `ws` is taken for `http`. */
export function subscribe(url: string, table: string, options?: Options): Subscription;

export class Subscription {
  private constructor();
  readonly table: string;
  readonly rows: ReadonlyMap<string, Row>;
  /** Everything up to here has been applied; null before the first snapshot. */
  readonly position: string | null;
  readonly status: Status;
  readonly counters: Counters;
  /** In use, or tried. */
  readonly transport: "websocket" | "sse" | "poll";
  /** Age of the newest event in the table as of the last heartbeat, ms; null if unknown. */
  readonly lagMs: number | null;
  /** Messages that the server counts as not yet processed here. */
  readonly behind: number;
  /** The server's clock less this machine's, ms. */
  readonly skew: number;
  /** Whether this tab has the connection. */
  readonly leads: boolean;
  /** Whether a reload goes on from here. */
  readonly persistent: boolean;
  /** End it; what was stored stays. */
  close(): void;
}

/** A key is needed, or this one is not good any more. */
export class Locked extends Error {}

/** A reader's key. Without one of its own it takes the tab's, from `sessionStorage`. */
export class Access {
  constructor(server: string, key?: string | null, tickets?: (() => Promise<string>) | null);
  /** Whether there is a key, or tickets are shown. */
  readonly keyed: boolean;
  /** Keep a key in this tab; false: the server does not know it. */
  enter(key: string): Promise<boolean>;
  /** What a WebSocket shows instead of the key; null: the server wants none. Throws Locked. */
  ticket(): Promise<string | null>;
  /** Headers of a request. Throws Locked. */
  headers(): Record<string, string>;
  /** What a request other than a WebSocket shows. Throws Locked. */
  shown(): Promise<{ headers: Record<string, string>; query: Record<string, string> }>;
  /** The server has refused the key: forget it. */
  refused(): void;
}
