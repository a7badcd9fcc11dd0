/**
 * Tabs of one browser that show the same rows share one connection. The tab that holds a Web Lock leads: it connects, stores, and
 * tells the others by a BroadcastChannel what it applied. When it closes or crashes the browser gives the lock to another tab,
 * which goes on from the position that it has.
 *
 * Web Locks need a secure context (HTTPS, or localhost). Without them, or with `share: false`, each tab leads.
 */

const HELLO = "hello"; // a tab that follows asks for the state
const WAKE = "wake"; // … asks the leader to try again now

export class Tabs {
  /** Whether this tab has the connection. */
  leads = false;
  #name;
  #on;
  #id = `${Date.now()}-${Math.random()}`;
  #channel = null;
  #leaving = new AbortController();
  #release = () => {};

  /**
   * @param {string|null} name what the tabs have to have in common; null: they share nothing
   * @param {{lead: () => void, told: (news: Object) => void, state: () => Object, wake: () => void}} on
   *   `lead` is called once, when this tab begins to lead; `told` with what the leader tells; `state` gives the leader's whole state
   */
  constructor(name, on) {
    this.#name = name;
    this.#on = on;
  }

  join() {
    if (this.#name === null || !globalThis.navigator?.locks || !globalThis.BroadcastChannel) {
      this.#lead();
      return;
    }
    this.#channel = new BroadcastChannel(this.#name);
    this.#channel.onmessage = ({ data }) => this.#heard(data);
    const held = () => {
      if (this.#leaving.signal.aborted) return undefined;
      this.#lead();
      return new Promise((release) => (this.#release = release));
    };
    navigator.locks.request(this.#name, { signal: this.#leaving.signal }, held).catch(() => {}); // we left while waiting
    this.ask();
  }

  leave() {
    this.leads = false;
    this.#leaving.abort();
    this.#release();
    this.#channel?.close();
  }

  /** Tell the tabs that follow. */
  tell(news) {
    if (this.leads) this.#channel?.postMessage({ ...news, at: Date.now() });
  }

  /** Ask the leader for its state, or to try again now. */
  ask(what = HELLO) {
    if (!this.leads) this.#channel?.postMessage({ ask: what, from: this.#id });
  }

  wake() {
    this.ask(WAKE);
  }

  #lead() {
    this.leads = true;
    this.#on.lead();
  }

  #heard(news) {
    if (news.ask === HELLO && this.leads) this.tell({ ...this.#on.state(), to: news.from });
    else if (news.ask === WAKE && this.leads) this.#on.wake();
    else if (news.ask === undefined && !this.leads && (news.to ?? this.#id) === this.#id) this.#on.told(news);
  }
}
