/**
 * Three ways to the server's messages: WebSocket, server-sent events (SSE) and long polling.
 *
 * `receive(transport, request, heard, signal)` calls `heard` for each message of docs/reference/protocol.md, whatever the wire form. Its
 * promise is rejected when the connection ends, with what to do next: `Refused` is final, `Lost` asks for another attempt, and
 * `Blocked` asks for another transport. An abort of the signal ends it silently.
 */

import { Locked } from "./access.js";

const POLL_S = "10"; // a poll's heartbeat tells the lag
const ACK_MS = 2_000; // less than the server's patience, `serve.slow_after_ms`
const FINAL = new Set([
  "bad_filter", "bad_message", "bad_position", "bad_request", "forbidden", "no_such_table", "not_served", "unauthorized",
]);
const CLOSE_CODES = { 4400: "bad_request", 4401: "unauthorized", 4403: "forbidden", 4404: "no_such_table" };
const UNAVAILABLE = new Set([429, 502, 503, 504]); // a proxy's answers while there is no server behind it

/** The server refuses this request; asking again does not help. */
export class Refused extends Error {
  /** @param {string} code machine-readable, as in docs/reference/protocol.md */
  constructor(code, detail) {
    super(detail);
    this.code = code;
  }
}

/** A connection failed or ended. */
export class Lost extends Error {}

/** What answers does not speak this transport. */
export class Blocked extends Error {
  /** @param {number} [status] of the HTTP answer; 0: none */
  constructor(detail, status = 0) {
    super(detail);
    this.status = status;
  }
}

export const TRANSPORTS = ["websocket", "sse", "poll"]; // in the order in which they are tried

/**
 * @param {string} transport one of TRANSPORTS
 * @param {{base: string, query: Object<string, string>, access: Access, processed: () => string|null}} request
 * @param {(message: Object) => void} heard
 * @param {AbortSignal} signal
 * @returns {Promise<never>}
 */
export function receive(transport, request, heard, signal) {
  return { websocket, sse, poll }[transport](request, heard, signal);
}

async function websocket(request, heard, signal) {
  const ticket = await reached(request.access.ticket());
  if (signal.aborted) return;
  const query = new URLSearchParams(ticket === null ? request.query : { ...request.query, ticket });
  const socket = new WebSocket(`${request.base.replace(/^http/, "ws")}/v1/subscribe?${query}`);
  await new Promise((_, reject) => {
    let came = false;
    let refusal = null;
    let acked = request.processed();
    let ackedAt = 0;
    let timer = 0;
    const ack = () => {
      clearTimeout(timer);
      timer = 0;
      const position = request.processed();
      if (position === null || position === acked || socket.readyState !== WebSocket.OPEN) return;
      socket.send(JSON.stringify({ type: "ack", position }));
      acked = position;
      ackedAt = Date.now();
    };
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      socket.onmessage = socket.onclose = null; // a dead peer may take a minute to answer the close
      socket.close();
    });
    socket.onmessage = ({ data }) => {
      let message;
      try {
        message = parsed(data);
      } catch (error) {
        reject(error);
        return;
      }
      if (message.type === "error") refusal = message;
      else came = true;
      heard(message);
      if (Date.now() - ackedAt >= ACK_MS) ack();
      else timer ||= setTimeout(ack, ACK_MS);
    };
    socket.onclose = async ({ code, reason }) => {
      const detail = reason || `connection closed (${code})`;
      const named = refusal?.code ?? CLOSE_CODES[code];
      if (named !== undefined && !(came && named === "unauthorized")) reject(meaning(named, refusal?.detail ?? detail));
      else if (came || refusal !== null || code !== 1006) reject(new Lost(detail));
      else reject(await unopened(request, detail));
    };
  });
}

/** A browser does not tell why no WebSocket came about: either nothing answers, or something does that lets none through. */
async function unopened({ base }, detail) {
  const signal = AbortSignal.timeout(5_000);
  const reached = await fetch(`${base}/healthz`, { mode: "no-cors", cache: "no-store", signal }).then(() => true, () => false);
  return reached ? new Blocked(detail) : new Lost(detail);
}

async function sse(request, heard, signal) {
  const answer = await asked(request, "/v1/subscribe", request.query, signal, "text/event-stream");
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let came = false;
  let line = []; // its parts
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const parts = value.split("\n");
      while (parts.length > 1) {
        const whole = [...line, parts.shift()].join("");
        line = [];
        if (!whole.startsWith("data:")) continue;
        const message = parsed(whole.slice(5));
        came = true;
        if (message.type === "error") throw meaning(message.code, message.detail);
        if (message.type === "close") throw new Lost(message.detail);
        heard(message);
      }
      line.push(parts[0]);
    }
  } catch (error) {
    throw error instanceof TypeError ? ended(came, error.message) : error;
  }
  throw ended(came, "the stream ended");
}

async function poll(request, heard, signal) {
  const query = { ...request.query, wait: "0" }; // at first: are we there?
  let keyed = query.from === undefined; // else no message says which columns are the key: the table's address does
  for (;;) {
    const answer = await (await asked(request, "/v1/poll", query, signal)).json().catch(() => {
      throw new Lost("the answer broke off");
    });
    for (const message of answer.messages) {
      if (message.type === "change" && !keyed) {
        const shown = Object.entries(query).filter(([name]) => ["where", "columns", "select"].includes(name));
        const path = `/v1/tables/${encodeURIComponent(query.table)}`;
        const shape = await (await asked(request, path, { ...Object.fromEntries(shown), limit: "1" }, signal)).json();
        heard({ type: "resumed", key: shape.key, position: query.from });
      }
      keyed ||= message.type === "change" || message.type === "snapshot";
      heard(message);
    }
    if (answer.messages.at(-1).type !== "heartbeat") heard({ type: "heartbeat", behind: answer.behind });
    Object.assign(query, { from: answer.position, wait: POLL_S });
  }
}

/** The answer to a GET, of the type that was asked for. */
async function asked({ base, access }, path, query, signal, accept = "application/json") {
  const shown = await reached(access.shown());
  const headers = { ...shown.headers, Accept: accept };
  const address = `${base}${path}?${new URLSearchParams({ ...query, ...shown.query })}`;
  const answer = await fetch(address, { headers, signal, cache: "no-store" }).catch((error) => {
    throw new Lost(error.message);
  });
  const kind = answer.headers.get("content-type") ?? "";
  if (answer.status === 200 && kind.startsWith(accept)) return answer;
  if (kind.startsWith("application/problem+json")) {
    const { code, detail } = await answer.json();
    throw meaning(code ?? `http_${answer.status}`, detail);
  }
  throw UNAVAILABLE.has(answer.status) ? new Lost(`HTTP ${answer.status}`) : new Blocked(`HTTP ${answer.status}`, answer.status);
}

/** Who gives tickets may be away for a while. */
async function reached(shown) {
  try {
    return await shown;
  } catch (error) {
    throw error instanceof Locked ? error : new Lost(error.message);
  }
}

function meaning(code, detail) {
  return FINAL.has(code) ? new Refused(code, detail ?? code) : new Lost(detail ?? code);
}

function ended(came, detail) {
  return came ? new Lost(detail) : new Blocked(detail);
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Refused("bad_message", `${text.slice(0, 80)} is not JSON`);
  }
}
