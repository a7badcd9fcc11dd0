/**
 * The reader's key of this tab, and the tickets that it is exchanged for: a WebSocket takes no header, and a key belongs into
 * no address. The key lives in the tab's session storage and ends with it.
 */

const PATIENCE_MS = 15_000;

/** There is no key, or one that is not good any more. */
export class Locked extends Error {}

export class Access {
  #base;
  #name;
  #needed = false;

  /** @param {string} server its address, `http://…` or `ws://…` */
  constructor(server) {
    this.#base = server.replace(/^ws/, "http").replace(/\/+$/, "");
    this.#name = `millrace.key|${this.#base}`;
  }

  /** Whether this tab has a key. */
  get keyed() {
    return this.#key() !== null;
  }

  /**
   * What to show with the next connection; null where no key was ever asked for.
   * @returns {Promise<string|null>}
   * @throws {Locked} a key is needed
   */
  async ticket() {
    const key = this.#key();
    if (key === null) {
      if (this.#needed) throw new Locked("a key is needed");
      return null;
    }
    const ticket = await this.#exchange(key);
    if (ticket === undefined) {
      sessionStorage.removeItem(this.#name);
      this.#needed = true;
      throw new Locked("the key is not good any more");
    }
    return ticket;
  }

  /** The server wants a key. */
  refused() {
    this.#needed = true;
  }

  /**
   * Keep a key if it is good.
   * @param {string} key
   * @returns {Promise<boolean>} whether it is
   */
  async enter(key) {
    if ((await this.#exchange(key)) === undefined) return false;
    sessionStorage.setItem(this.#name, key);
    return true;
  }

  /** A ticket; null: none is needed; undefined: the key is not good. */
  async #exchange(key) {
    const headers = { Authorization: `Bearer ${key}` };
    const signal = AbortSignal.timeout(PATIENCE_MS);
    const answer = await fetch(`${this.#base}/v1/tickets`, { method: "POST", headers, cache: "no-store", signal });
    if (answer.status === 401) return undefined;
    if (answer.status === 201) return (await answer.json()).ticket;
    if (answer.status === 400) return null;
    throw new Error(`the server gives no ticket (${answer.status})`);
  }

  #key() {
    try {
      return sessionStorage.getItem(this.#name);
    } catch {
      return null; // no storage here
    }
  }
}
