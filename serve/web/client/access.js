/**
 * A reader's key in a browser. It is sent in a header only. A WebSocket takes no header, so each one shows a ticket that the key
 * is exchanged for. By default the key is that of the tab: it is kept in `sessionStorage` and ends with the tab.
 */

const PATIENCE_MS = 15_000;

/** The server wants a key, or does not know this one. */
export class Locked extends Error {}

export class Access {
  #base;
  #name;
  #given;
  #tickets;
  #needed = false;

  /**
   * @param {string} server its address, `http://…` or `ws://…`
   * @param {string|null} [key] used instead of the tab's, and stored nowhere
   * @param {(() => Promise<string>)|null} [tickets] fetches a ticket for each request, where the page must not have the key
   */
  constructor(server, key = null, tickets = null) {
    this.#base = server.replace(/^ws/, "http").replace(/\/+$/, "");
    this.#name = `millrace.key|${this.#base}`;
    this.#given = key;
    this.#tickets = tickets;
  }

  /** Whether there is a key, or tickets are shown. */
  get keyed() {
    return this.#tickets !== null || this.#key() !== null;
  }

  /**
   * Headers of a request.
   * @throws {Locked} a key is needed
   */
  headers() {
    const key = this.#key();
    if (key === null && this.#needed) throw new Locked("a key is needed");
    return key === null ? {} : { Authorization: `Bearer ${key}` };
  }

  /**
   * What to show with the next WebSocket; null where none is needed.
   * @returns {Promise<string|null>}
   * @throws {Locked} a key is needed, or this one is not good any more
   */
  async ticket() {
    if (this.#tickets !== null) return this.#tickets();
    const headers = this.headers();
    if (headers.Authorization === undefined) return null;
    const ticket = await this.#exchange(headers);
    if (ticket !== undefined) return ticket;
    this.refused();
    throw new Locked("the key is not good any more");
  }

  /** What a request that is not a WebSocket shows: headers, and parameters of its query. Throws as `ticket` does. */
  async shown() {
    if (this.#tickets !== null) return { headers: {}, query: { ticket: await this.#tickets() } };
    return { headers: this.headers(), query: {} };
  }

  /** The server wants a key, and this one is not good: forget it. */
  refused() {
    this.#needed = true;
    this.#given = null;
    try {
      sessionStorage.removeItem(this.#name);
    } catch {
      // no storage here
    }
  }

  /**
   * Keep a key in this tab if it is good.
   * @param {string} key
   * @returns {Promise<boolean>} whether it is
   */
  async enter(key) {
    if ((await this.#exchange({ Authorization: `Bearer ${key}` })) === undefined) return false;
    sessionStorage.setItem(this.#name, key);
    return true;
  }

  /** Names what this key may see without naming the key: its SHA-256; nothing without a key; null: nobody knows. */
  async scope() {
    if (this.#tickets !== null) return null;
    const key = this.#key();
    if (key === null) return "";
    const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(key));
    return Array.from(new Uint8Array(digest), (byte) => byte.toString(16).padStart(2, "0")).join("");
  }

  /** A ticket; null: none is needed; undefined: the key is not good. */
  async #exchange(headers) {
    const signal = AbortSignal.timeout(PATIENCE_MS);
    const answer = await fetch(`${this.#base}/v1/tickets`, { method: "POST", headers, cache: "no-store", signal });
    if (answer.status === 401) return undefined;
    if (answer.status === 201) return (await answer.json()).ticket;
    if (answer.status === 400) return null;
    throw new Error(`the server gives no ticket (${answer.status})`);
  }

  #key() {
    try {
      return this.#given ?? sessionStorage.getItem(this.#name);
    } catch {
      return null; // no storage here
    }
  }
}
