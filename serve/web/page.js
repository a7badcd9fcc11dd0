/** What every page here has: elements, requests, the line that tells the connection's state, the form for a key, the theme. */

import { Access, Locked } from "./client/millrace.js";

const PATIENCE_MS = 15_000;
const root = document.documentElement;
const whole = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });

/** The server of this page; its files may lie below a proxy's path. */
export const server = new URL(".", import.meta.url).href.replace(/\/$/, "");
export const access = new Access(server);

/** The element of this id. */
export const $ = (id) => document.getElementById(id);

/**
 * A new element. Properties with a hyphen, and `role`, are attributes; children are nodes or texts, never markup.
 *
 * @param {string} tag with classes: `td.number`
 */
export function el(tag, properties = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const made = document.createElement(name);
  made.className = classes.join(" ");
  for (const [property, value] of Object.entries(properties)) {
    if (property.includes("-") || property === "role") made.setAttribute(property, value);
    else made[property] = value;
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** The server has refused a request. */
export class Problem extends Error {
  /** @param {{status?: number, code?: string, detail?: string, remedy?: string}} told RFC 9457 */
  constructor(told) {
    super([told.detail ?? `the server answers ${told.status}`, told.remedy].filter(Boolean).join(". "));
    this.status = told.status;
    this.code = told.code;
  }
}

/**
 * Ask the server, with the tab's key.
 *
 * @param {string} path from `v1/` on
 * @param {Object} [query]
 * @param {Object} [body] makes it a POST
 * @returns {Promise<Object>} its JSON
 * @throws {Problem|Locked|TypeError} refused; a key is needed; no answer
 */
export async function ask(path, query = {}, body = undefined) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== "");
  const answer = await fetch(`${server}/${path}?${new URLSearchParams(given)}`, {
    method: body === undefined ? "GET" : "POST",
    headers: { ...access.headers(), ...(body === undefined ? {} : { "Content-Type": "application/json" }) },
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-cache",
    signal: AbortSignal.timeout(PATIENCE_MS),
  });
  if (answer.ok) return answer.json();
  if (answer.status === 401) {
    access.refused();
    throw new Locked("a key is needed");
  }
  throw new Problem({ ...(await answer.json().catch(() => ({}))), status: answer.status });
}

/** The state of a subscription in a few words. */
export function stateText(status) {
  const wait = Math.max(0, Math.ceil((status.retryAt - Date.now()) / 1000));
  switch (status.state) {
    case "live":
      return "Live";
    case "slow":
      return `Slow: ${whole.format(status.behind)} behind`;
    case "resuming":
      return "Resuming";
    case "snapshot":
      return "Loading";
    case "reconnecting":
      return wait > 0 ? `Reconnecting in ${wait} s` : "Reconnecting";
    case "missing":
      return `No table ${status.table} yet`;
    case "locked":
      return "Key needed";
    case "refused":
      return "Refused";
    case "closed":
      return "Closed";
    default:
      return "Connecting";
  }
}

const WORST = ["locked", "refused", "reconnecting", "missing", "connecting", "resuming", "snapshot", "slow", "live", "closed"];
let announced = "";

/** Show the worst of these states, and say it aloud when it matters; a key that is needed is asked for. */
export function showState(statuses) {
  const place = (status) => WORST.indexOf(status.state);
  const status = statuses.reduce((worst, next) => (place(next) < place(worst) ? next : worst));
  const text = stateText(status);
  if (root.dataset.state !== status.state) root.dataset.state = status.state;
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").title = status.detail ?? "";
  if ($("unlock").hidden !== (status.state !== "locked")) showLock(status);
  const news = status.state === "reconnecting" ? "Connection lost, reconnecting" : stateText({ ...status, retryAt: 0 });
  if (news !== announced && !["connecting", "resuming", "snapshot"].includes(status.state)) {
    if (announced !== "" || status.state !== "live") announce(news);
    announced = news;
  }
}

/** Have a screen reader say something that nobody looks for. */
export function announce(text) {
  $("announce").textContent = text;
}

function showLock(status) {
  $("unlock").hidden = status.state !== "locked";
  $("unlock-note").textContent = status.state === "locked" ? `${server}: ${status.detail}` : "";
  if (!$("unlock").hidden) $("key").focus();
}

/** Take a key that is good, and begin anew with it. */
async function unlock(event) {
  event.preventDefault(); // it goes into a header, never into an address
  try {
    if (await access.enter($("key").value.trim())) location.reload();
    else $("unlock-note").textContent = "The server does not know this key.";
  } catch (error) {
    $("unlock-note").textContent = `That did not work: ${error.message}`;
  }
}

/** What was stored under a name; `otherwise` where there is nothing, or no storage. */
export function stored(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** Store for the next time; without storage it holds until the page is left. */
export function store(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    // no storage here
  }
}

function darkNow() {
  const chosen = root.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function switchTheme() {
  root.dataset.theme = darkNow() ? "light" : "dark";
  store("millrace.theme", root.dataset.theme);
  labelTheme();
}

function labelTheme() {
  $("theme").setAttribute("aria-label", `Switch to the ${darkNow() ? "light" : "dark"} theme`);
  dispatchEvent(new Event("themechange"));
}

$("theme").addEventListener("click", switchTheme);
$("unlock").addEventListener("submit", unlock);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", labelTheme);
labelTheme();
