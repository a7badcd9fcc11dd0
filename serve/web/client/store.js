/**
 * Where a subscription keeps its rows and its position between page loads.
 *
 * Rows and position are written in one IndexedDB transaction, so that what is found after a reload is always a state
 * that the table really had at that position: resuming from it loses nothing and applies nothing twice.
 *
 * One page writes a subscription at a time: the last that loaded it. An older tab notices in its next transaction,
 * changes nothing, and goes on from memory.
 */

const DATABASE = "millrace";
const VERSION = 1;
const ROWS = "rows"; // [subscription, row key] -> row
const HEADS = "heads"; // subscription -> {writer, position, ...}
const OPEN_MS = 3000; // a private window may leave the request to open unanswered

/**
 * @typedef {Object} Batch
 * @property {boolean} replace whether everything held before goes
 * @property {Map<string, Object|null>} rows rows by key; null where a row went
 * @property {Object} head position and counters that belong to exactly these rows
 */

/** Keeps nothing: a reload begins with a snapshot. */
export class MemoryStore {
  persistent = false;

  async load() {
    return { rows: [], head: null };
  }

  async save(_batch) {
    return true;
  }
}

/** Keeps one subscription in IndexedDB. */
export class IndexedStore {
  persistent = true;
  #database;
  #id;
  #writer = `${Date.now()}-${Math.random()}`;

  constructor(database, id) {
    this.#database = database;
    this.#id = id;
  }

  /** What was saved last, as `{rows: [[key, row], ...], head}`; from here on this page is the writer. */
  load() {
    const [transaction, rows, heads] = this.#begin();
    const found = { rows: [], head: null };
    const keys = rows.getAllKeys(this.#range());
    const values = rows.getAll(this.#range());
    values.onsuccess = () => {
      found.rows = keys.result.map((key, index) => [key[1], values.result[index]]);
    };
    const head = heads.get(this.#id);
    head.onsuccess = () => {
      found.head = head.result?.position ? head.result : null;
      heads.put({ ...head.result, writer: this.#writer }, this.#id);
    };
    return done(transaction, found);
  }

  /**
   * Writes a batch, whole or not at all.
   *
   * @param {Batch} batch
   * @returns {Promise<boolean>} false: another page has become the writer, and nothing was written
   */
  save({ replace, rows: changed, head }) {
    const [transaction, rows, heads] = this.#begin();
    const outcome = { written: false };
    const current = heads.get(this.#id);
    current.onsuccess = () => {
      if (current.result?.writer !== this.#writer) return;
      if (replace) rows.delete(this.#range());
      for (const [key, row] of changed) {
        if (row === null) rows.delete([this.#id, key]);
        else rows.put(row, [this.#id, key]);
      }
      heads.put({ ...head, writer: this.#writer }, this.#id);
      outcome.written = true;
    };
    return done(transaction, outcome).then(() => outcome.written);
  }

  #begin() {
    const transaction = this.#database.transaction([ROWS, HEADS], "readwrite");
    return [transaction, transaction.objectStore(ROWS), transaction.objectStore(HEADS)];
  }

  #range() {
    return IDBKeyRange.bound([this.#id], [this.#id, []]); // an array sorts after every string
  }
}

/** A store for the subscription of this id; in memory where the browser keeps nothing. */
export async function openStore(id) {
  try {
    return new IndexedStore(await openDatabase(), id);
  } catch {
    return new MemoryStore();
  }
}

function openDatabase() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, VERSION);
    const timer = setTimeout(() => reject(new Error("IndexedDB does not answer")), OPEN_MS);
    request.onupgradeneeded = () => {
      request.result.createObjectStore(ROWS);
      request.result.createObjectStore(HEADS);
    };
    request.onsuccess = () => {
      clearTimeout(timer);
      // A page of a later version wants to upgrade: let it, and go on from memory.
      request.result.onversionchange = () => request.result.close();
      resolve(request.result);
    };
    request.onerror = () => {
      clearTimeout(timer);
      reject(request.error);
    };
  });
}

function done(transaction, value) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(value);
    transaction.onabort = () => reject(transaction.error ?? new Error("transaction aborted"));
  });
}
