// Where a bucket lies: a folder behind any file server, or a public bucket of the Hub or of S3.

import { demand, quoted, Refused } from "./refused.js";

/** An object or a listing is not there; a later try may find it. */
export class Missing extends Refused {}

/**
 * @typedef {object} Bucket
 * @property {string} url
 * @property {number} pollSeconds seconds between two looks at HEAD
 * @property {(key: string, limit: number) => Promise<Uint8Array>} get
 * @property {(prefix: string) => Promise<string[]>} list the keys in a folder that ends in "/"
 * @property {(onChange: (prefix: string) => void, signal: AbortSignal) => Promise<void>} [feed] reports changed keys until
 *   it ends; "" stands for any key, also when the feed begins
 * @property {(size: number) => void} [onBytes] called with the number of bytes that have come since its last call
 */

/**
 * @param {string} url hf://buckets/<owner>/<name>[/<prefix>], s3://<name>[/<prefix>], or a folder's address
 * @param {string} [endpoint] the address of the Hub or of the S3 bucket, if it is not the usual one
 * @returns {Bucket}
 */
export function openBucket(url, endpoint) {
  if (url.startsWith("hf://")) return new Hub(url, endpoint ?? "https://huggingface.co");
  if (url.startsWith("s3://")) return new S3(url, endpoint);
  const base = new URL(url.endsWith("/") ? url : `${url}/`, globalThis.location?.href);
  demand(/^https?:$/.test(base.protocol), `${quoted(url)} is not a bucket: give an hf://, s3:// or http(s):// address`);
  return new Folder(base.href);
}

/**
 * Fetch at most `limit` bytes.
 * @param {string} address
 * @param {number} limit
 * @param {string} key for messages
 * @param {(size: number) => void} [onBytes]
 */
async function fetched(address, limit, key, onBytes = () => {}) {
  /** @type {Map<string, Promise<Response>> | undefined} */
  const early = /** @type {any} */ (globalThis).early;
  let answer = await early?.get(address)?.catch(() => undefined);
  early?.delete(address);
  try {
    answer ??= await fetch(address, { cache: "no-cache", credentials: "omit", referrerPolicy: "no-referrer" });
  } catch {
    throw new Missing(`${key} could not be fetched: check the network, and that its server allows other pages (CORS)`);
  }
  if (!answer.ok || !answer.body) throw new Missing(`${key} does not exist, or is not public (${answer.status})`);
  const data = [];
  let size = 0;
  const reader = answer.body.getReader();
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      size += part.value.length;
      demand(size <= limit, `${key} is larger than ${limit} bytes`);
      data.push(part.value);
      onBytes(part.value.length);
    }
  } catch (error) {
    reader.cancel().catch(() => {});
    if (error instanceof Refused) throw error;
    throw new Missing(`the connection broke while ${key} was fetched`);
  }
  return { data: concatenated(data), next: answer.headers.get("link") ?? "" };
}

/** @param {Uint8Array[]} parts */
export function concatenated(parts) {
  const whole = new Uint8Array(parts.reduce((sum, { length }) => sum + length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

const LISTING = 32 << 20; // bytes

/** @param {string} prefix @param {() => string[]} read */
function readable(prefix, read) {
  try {
    return read();
  } catch {
    throw new Missing(`the list of ${prefix} cannot be read`);
  }
}

/** @param {string} key */
const quote = (key) => key.split("/").map(encodeURIComponent).join("/");

/** A folder: its server lists it as a page of links, or the folder has a file keys.json with all keys. */
class Folder {
  pollSeconds = 1;
  /** @type {((size: number) => void) | undefined} */
  onBytes;
  /** @type {Promise<string[] | null> | undefined} */
  #keys;

  /** @param {string} url */
  constructor(url) {
    this.url = url;
  }

  /** @param {string} key @param {number} limit */
  async get(key, limit) {
    return (await fetched(this.url + quote(key), limit, key, this.onBytes)).data;
  }

  /** @param {string} prefix */
  async list(prefix) {
    this.#keys ??= this.get("keys.json", LISTING).then((data) => JSON.parse(new TextDecoder().decode(data))).catch(() => null);
    const keys = await this.#keys;
    if (Array.isArray(keys)) return keys.filter((key) => typeof key === "string" && key.startsWith(prefix));
    const page = await this.get(prefix, LISTING);
    const links = [...new TextDecoder().decode(page).matchAll(/href="([^"?#/][^"?#]*)"/gi)].map(([, link]) => link);
    const names = readable(prefix, () => links.map(decodeURIComponent));
    return names.filter((name) => !name.includes(":") && !name.startsWith("..")).map((name) => prefix + name);
  }
}

class Hub {
  pollSeconds = 5; // the Hub limits the requests of visitors without an account
  #cursor = ""; // where the next feed goes on
  /** @type {((size: number) => void) | undefined} */
  onBytes;

  /** @param {string} url @param {string} endpoint */
  constructor(url, endpoint) {
    const [, id, folder] = /^hf:\/\/buckets\/([\w.-]+\/[\w.-]+)(?:\/(.*?))?\/?$/.exec(url) ?? [];
    demand(id, `${quoted(url)} is not hf://buckets/<owner>/<name>[/<prefix>]`);
    this.url = url;
    this.id = id;
    this.folder = folder ? `${folder}/` : "";
    this.endpoint = endpoint;
  }

  /**
   * The Hub's feed of the bucket's changes. The Hub may have no feed for visitors without an account; then this returns.
   * @param {(key: string) => void} onChange
   * @param {AbortSignal} signal
   */
  async feed(onChange, signal) {
    const headers = { accept: "text/event-stream" };
    const cursor = this.#cursor && `?cursor=${encodeURIComponent(this.#cursor)}`;
    this.#cursor = ""; // if the Hub refuses this cursor, the next feed begins without one
    const answer = await fetch(`${this.endpoint}/api/buckets/${this.id}/events${cursor}`,
      { headers, signal, cache: "no-store", credentials: "omit", referrerPolicy: "no-referrer" });
    if (!answer.ok || !answer.body || !answer.headers.get("content-type")?.includes("event-stream")) return;
    for await (const { name, payload } of events(answer.body)) {
      if (payload.cursor) this.#cursor = String(payload.cursor);
      if (name === "ready") onChange("");
      if (name === "changes") {
        for (const { path = "" } of payload.changes ?? []) {
          if (path.startsWith(this.folder)) onChange(path.slice(this.folder.length));
        }
      }
      if (name === "reset") this.#cursor = "";
      if (name === "reset" || name === "reconnect") return;
    }
  }

  /** @param {string} key @param {number} limit */
  async get(key, limit) {
    const path = encodeURIComponent(this.folder + key);
    return (await fetched(`${this.endpoint}/buckets/${this.id}/resolve/${path}`, limit, key, this.onBytes)).data;
  }

  /** @param {string} prefix */
  async list(prefix) {
    const start = this.folder + prefix;
    const path = encodeURIComponent(start.replace(/\/$/, ""));
    /** @type {string[]} */
    const found = [];
    /** @type {string | undefined} */
    let address = `${this.endpoint}/api/buckets/${this.id}/tree/${path}`;
    while (address) {
      const page = await fetched(address, LISTING, `the list of ${prefix}`);
      found.push(...readable(prefix, () => {
        const entries = /** @type {{type: string, path: string}[]} */ (JSON.parse(new TextDecoder().decode(page.data)));
        return entries.filter(({ path: at }) => at.startsWith(start))
          .map(({ type, path: at }) => at.slice(this.folder.length) + (type === "directory" ? "/" : ""));
      }));
      address = /<([^>]+)>; *rel="?next"?/.exec(page.next)?.[1];
    }
    return found;
  }
}

/**
 * The events of a stream, with their names.
 * @param {ReadableStream<Uint8Array>} body
 */
async function* events(body) {
  const reader = body.pipeThrough(/** @type {any} */ (new TextDecoderStream())).getReader();
  let text = "";
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      text += part.value;
      demand(text.length <= LISTING, "the feed's event is too large");
      const whole = text.split("\n\n");
      text = whole.pop() ?? "";
      for (const event of whole) {
        const [name, data] = ["event", "data"].map((field) => RegExp(`^${field}: (.*)$`, "m").exec(event)?.[1]);
        if (name && data) yield { name, payload: JSON.parse(data) };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

class S3 {
  pollSeconds = 2;
  /** @type {((size: number) => void) | undefined} */
  onBytes;

  /** @param {string} url @param {string} [endpoint] */
  constructor(url, endpoint) {
    const [, name, folder] = /^s3:\/\/([\w.-]+)(?:\/(.*?))?\/?$/.exec(url) ?? [];
    demand(name, `${quoted(url)} is not s3://<name>[/<prefix>]`);
    this.url = url;
    this.folder = folder ? `${folder}/` : "";
    this.root = endpoint ?? `https://${name}.s3.amazonaws.com`;
  }

  /** @param {string} key @param {number} limit */
  async get(key, limit) {
    return (await fetched(`${this.root}/${quote(this.folder + key)}`, limit, key, this.onBytes)).data;
  }

  /** @param {string} prefix */
  async list(prefix) {
    const start = this.folder + prefix;
    /** @type {string[]} */
    const found = [];
    /** @type {string | undefined} */
    let more = "";
    while (more !== undefined) {
      const query = `list-type=2&delimiter=/&prefix=${encodeURIComponent(start)}${more}`;
      const page = new TextDecoder().decode((await fetched(`${this.root}?${query}`, LISTING, `the list of ${prefix}`)).data);
      found.push(...[...page.matchAll(/<(?:Key|Prefix)>([^<]+)</g)].map(([, key]) => key));
      const token = /<NextContinuationToken>([^<]+)</.exec(page)?.[1];
      more = token && `&continuation-token=${encodeURIComponent(token)}`;
    }
    return found.filter((key) => key.startsWith(start) && key !== start).map((key) => key.slice(this.folder.length));
  }
}
