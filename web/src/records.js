// HEAD and manifests of docs/wire-format.md: parsed, with every field checked, and their seals and signatures.

import { demand, quoted, Refused } from "./refused.js";

/** @typedef {{key: string, size: number, sha256: string}} FileRef */
/** @typedef {FileRef & {base: number, version: number, changed: number, parts: number}} DeltaRef a file of a delta; if it has several parts, `sha256` is of the sha256s of all of them */
/** @typedef {{version: number, files: FileRef[]}} Anchor */
/** @typedef {{format: string, run: string, seal: string, signature: string, born: number, writer_term: number, writer: string}} Sealed */
/** @typedef {Sealed & {version: number | null, manifest: FileRef | null}} Head */
/**
 * @typedef {Sealed & {version: number, sync: number, created_at: number, digest: string, anchor: Anchor,
 *   deltas: DeltaRef[], jumps: DeltaRef[], parent: FileRef | null, changed: number, total: number, full_bytes: number}} Manifest
 */
/** @typedef {{anchor: Anchor | null, deltas: DeltaRef[]}} Recipe */

export const FORMAT = "delta-weight-sync/3";
export const LARGEST_RECORD = 8 << 20; // bytes
const YEAR_9999 = 253402300800; // seconds

/** @param {RegExp} pattern @returns {(value: any) => boolean} */
const text = (pattern) => (value) => typeof value === "string" && pattern.test(value);
/** @param {any} value */
const count = (value) => Number.isSafeInteger(value) && value >= 0;
/** @param {any} value */
const time = (value) => typeof value === "number" && value >= 0 && value < YEAR_9999;
/** @param {(value: any) => boolean} check @returns {(value: any) => boolean} */
const orNull = (check) => (value) => value === null || check(value);
/** @param {(value: any) => boolean} check @param {number} most @returns {(value: any) => boolean} */
const listOf = (check, most) => (value) => Array.isArray(value) && value.length <= most && value.every(check);
/** @param {Record<string, (value: any) => boolean>} fields @returns {(value: any) => boolean} */
const table = (fields) => (value) => wrongField(value, fields) === undefined;

/**
 * The first field that is missing, wrong or unknown.
 * @param {any} value
 * @param {Record<string, (value: any) => boolean>} fields
 */
function wrongField(value, fields) {
  if (typeof value !== "object" || value === null || Array.isArray(value)) return "";
  const unknown = Object.keys(value).find((name) => !Object.hasOwn(fields, name));
  return unknown ?? Object.keys(fields).find((name) => !fields[name](value[name]));
}

const RUN = /^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$/;
/** No part between slashes is empty or begins with a dot. @param {any} value */
const isKey = (value) => text(/^[A-Za-z0-9][A-Za-z0-9._-]*(\/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$/)(value) && value.length <= 501;
const file = { key: isKey, size: count, sha256: text(/^[0-9a-f]{64}$/) };
const isDelta = table({ ...file, base: count, version: count, changed: count, parts: count });
const MAX_PARTS = 64;
const MAX_FILES = 16384;
const sealed = {
  format: (/** @type {any} */ value) => value === FORMAT,
  run: text(RUN),
  seal: text(/^[0-9a-f]{64}$/),
  signature: text(/^([0-9a-f]{128})?$/),
  born: time,
  writer_term: count,
  writer: text(/^[0-9a-f]{32}$/),
};
const FIELDS = {
  Head: { ...sealed, version: orNull(count), manifest: orNull(table(file)) },
  Manifest: {
    ...sealed, version: count, sync: count, created_at: time, digest: text(/^[0-9a-f]{16}$/),
    anchor: table({ version: count, files: listOf(table(file), 1024) }),
    deltas: listOf(isDelta, MAX_FILES), jumps: listOf(isDelta, MAX_FILES), parent: orNull(table(file)),
    changed: count, total: count, full_bytes: count,
  },
};

/** @param {Uint8Array} data */
export async function sha256(data) {
  const hash = await crypto.subtle.digest("SHA-256", /** @type {Uint8Array<ArrayBuffer>} */ (data));
  return hex(new Uint8Array(hash));
}

/** @param {Uint8Array} bytes */
const hex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");

/**
 * Refuse an object that is not the one that a record names.
 * @param {FileRef} ref
 * @param {Uint8Array} data
 */
export async function check(ref, data) {
  const same = data.length === ref.size && (await sha256(data)) === ref.sha256;
  demand(same, `${ref.key} is not the published object (sha256 or size differs); it was not applied`);
}

/**
 * Refuse the parts of a delta or a jump unless they are the published ones.
 * @param {DeltaRef[]} parts
 * @param {Uint8Array[]} files
 */
export async function checkTogether(parts, files) {
  const hashes = await Promise.all(files.map(async (file) => bytes(await sha256(file))));
  const together = new Uint8Array(hashes.length * 32);
  hashes.forEach((hash, i) => together.set(hash, i * 32));
  demand(parts.length === parts[0].parts && (await sha256(together)) === parts[0].sha256,
    `the parts of ${parts[0].key} are not the published objects: they were not applied`);
}

/** The public keys that a reader trusts; without any, no signature is checked. */
export class PublicKeys {
  /** @param {string} words `ed25519_public_` and 64 hex digits, several separated by commas */
  constructor(words = "") {
    this.keys = words.split(",").map((word) => word.trim()).filter(Boolean);
    demand(this.keys.length || !words, `${quoted(words)} names no public key`);
    for (const key of this.keys) {
      demand(/^ed25519_public_[0-9a-f]{64}$/.test(key), `${quoted(key)} is not ed25519_public_ and 64 hex digits`);
    }
  }

  /** The key that signed a record; "" if none is trusted. @param {Sealed} record @param {string} key */
  async check(record, key) {
    if (!this.keys.length) return "";
    const message = new TextEncoder().encode(`${record.format} ${record.seal}`);
    for (const word of this.keys) {
      const trusted = await crypto.subtle.importKey("raw", bytes(word.slice(-64)), "Ed25519", false, ["verify"]);
      if (await crypto.subtle.verify("Ed25519", trusted, bytes(record.signature), message)) return word;
    }
    throw new Refused(`${key} is not signed by a key that this page trusts`);
  }
}

/** @param {string} digits */
const bytes = (digits) => Uint8Array.from(digits.match(/../g) ?? [], (pair) => parseInt(pair, 16));

/**
 * @template {"Head" | "Manifest"} Kind
 * @param {Kind} kind
 * @param {Uint8Array} data
 * @param {string} key
 * @returns {Promise<Kind extends "Head" ? Head : Manifest>}
 */
export async function parse(kind, data, key) {
  let source;
  let value;
  try {
    source = new TextDecoder("utf-8", { fatal: true }).decode(data);
    value = JSON.parse(source);
  } catch {
    throw new Refused(`${key} is not JSON`);
  }
  if (kind === "Manifest") value = withKeys(value, key);
  const wrong = wrongField(value, FIELDS[kind]);
  demand(wrong === undefined, `${key} is not a valid ${kind}: its field ${quoted(wrong)} is missing, wrong or unknown`);
  const content = source.replace(`"seal":"${value.seal}","signature":"${value.signature}",`, "");
  const seal = await sha256(new TextEncoder().encode(`${kind}\n${content}`));
  demand(seal === value.seal, `${key} is damaged: its seal does not match its other fields`);
  if (kind === "Head") {
    demand((value.version === null) === (value.manifest === null),
      `${key} must have both a version and a manifest, or neither`);
  } else {
    checkLinks(value, key);
  }
  return value;
}

/**
 * Compute the keys of a manifest's files; what is not as it should be stays, and is refused after this.
 * @param {any} value
 * @param {string} key
 */
function withKeys(value, key) {
  if (typeof value?.run !== "string" || !Array.isArray(value?.anchor?.files)) return value;
  const folder = `runs/${value.run}/`;
  const writer = `t${value.writer_term}-${String(value.writer).slice(0, 8)}`;
  const usual = `${digits(value.anchor.version)}.${writer}`;
  const files = value.anchor.files.map((/** @type {any} */ row) => {
    demand(Array.isArray(row) && (row.length === 3 || row.length === 4), `${key}: a file of the anchor is not [name, size, sha256]`);
    const [name, size, sha256, place = usual] = row;
    return { key: `${folder}anchors/${place}/${name}`, size, sha256 };
  });
  return { ...value, anchor: { ...value.anchor, files },
    deltas: links(value.deltas, `${folder}deltas/`, writer, key), jumps: links(value.jumps, `${folder}jumps/`, writer, key) };
}

/** @param {any} number */
const digits = (number) => String(number).padStart(8, "0");

/** @param {any} rows @param {string} folder @param {string} writer @param {string} key */
function links(rows, folder, writer, key) {
  demand(Array.isArray(rows) && rows.length <= MAX_FILES, `${key}: ${folder} is not a list`);
  return rows.flatMap((/** @type {any} */ row) => {
    demand(Array.isArray(row) && (row.length === 5 || row.length === 6), `${key}: a delta is not [base, version, changed, size, sha256]`);
    const [base, version, changed, size, sha256, owner = writer] = row;
    demand(/^t\d{1,18}-[0-9a-f]{8}$/.test(owner), `${key}: the writer of a delta is wrong`);
    const parted = typeof size === "object" && size !== null;
    const sizes = parted ? Object.entries(size) : [["", size]];
    demand(!parted || (sizes.length > 0 && sizes.length <= MAX_PARTS && sizes.every(([part]) => /^r\d{1,9}$/.test(part))),
      `${key}: the parts of a delta are not 1 to ${MAX_PARTS} named sizes`);
    const start = folder.endsWith("jumps/") ? `${digits(base)}-` : "";
    return sizes.map(([part, each]) => ({
      key: `${folder}${start}${digits(version)}.${owner}${part && `.${part}`}.safetensors`,
      size: each, sha256, base, version, changed, parts: sizes.length,
    }));
  });
}

/** @param {Manifest} manifest @param {string} key */
function checkLinks({ version, deltas, jumps, anchor, parent, ...others }, key) {
  const steps = deltas.filter((one, i) => one.base !== deltas[i - 1]?.base || one.version !== deltas[i - 1].version); // the parts of a delta count as one step
  const first = version - steps.length;
  demand(steps.every((one, i) => one.base === first + i && one.version === one.base + 1),
    `${key}: its deltas do not lead to version ${version} one by one`);
  const short = jumps.find((one) => one.version - one.base < 2);
  demand(!short, `${key}: a jump from version ${short?.base} to ${short?.version} spans less than two versions`);
  const names = anchor.files.map((one) => nameOf(one));
  const known = new Set(names);
  demand(known.size === names.length, `${key}: two files of the anchor have the same name`);
  demand(!names.some((name) => foldersOf(name).some((folder) => known.has(folder))),
    `${key}: a file of the anchor has the name of a folder`);
  demand((parent === null) === (version === 0), `${key}: version 0 has no parent, and every other version has one`);
  demand(recipe({ version, deltas, jumps, anchor, parent, ...others }, null),
    `${key}: nothing leads from anchor ${anchor.version} to version ${version}`);
}

/** The last part of a file's key; for a file of an anchor, its path in the checkpoint's folder. @param {FileRef} ref */
export function nameOf({ key }) {
  const parts = key.split("/");
  return parts[2] === "anchors" && parts.length > 4 ? parts.slice(4).join("/") : key.slice(key.lastIndexOf("/") + 1);
}

/** The folders that a file lies in. @param {string} name */
const foldersOf = (name) => name.split("/").slice(0, -1).map((_, i, all) => all.slice(0, i + 1).join("/"));

/** @param {FileRef[]} refs */
export const sizeOf = (refs) => refs.reduce((sum, { size }) => sum + size, 0);

/**
 * The recipe for a manifest's version: fewest bytes, then fewest files. Null if no files lead there from `held`.
 * @param {Manifest} manifest
 * @param {number | null} held a version that is there already; null starts from the anchor
 * @returns {Recipe | null}
 */
export function recipe({ version, anchor, deltas, jumps }, held) {
  /** The parts of each delta and jump: all of them are needed. @type {Map<string, DeltaRef[]>} */
  const links = new Map();
  for (const part of [...deltas, ...jumps]) {
    const link = `${part.base}-${part.version}`;
    links.set(link, links.get(link) ?? []).get(link)?.push(part);
  }
  /** @type {Map<number, {size: number, files: number, parts: DeltaRef[]}>} */
  const reached = new Map([[held ?? anchor.version, { size: 0, files: 0, parts: [] }]]);
  for (const parts of [...links.values()].sort(([a], [b]) => a.base - b.base)) {
    const [from, known] = [reached.get(parts[0].base), reached.get(parts[0].version)];
    if (!from) continue;
    const [size, files] = [from.size + sizeOf(parts), from.files + parts.length];
    if (!known || size < known.size || (size === known.size && files < known.files)) {
      reached.set(parts[0].version, { size, files, parts });
    }
  }
  /** @type {DeltaRef[][]} */
  const way = []; // built from the end, so that no list is copied for each step
  let at = reached.get(version);
  if (!at) return null;
  for (; at?.parts.length; at = reached.get(at.parts[0].base)) way.push(at.parts);
  return { anchor: held === null ? anchor : null, deltas: way.reverse().flat() };
}

/**
 * Whether HEAD or manifest `a` is newer than `b`.
 * @param {Sealed & {version: number | null}} a
 * @param {Sealed & {version: number | null}} b
 */
export function newer(a, b) {
  const order = (/** @type {typeof a} */ one) => [one.born, one.writer_term, one.writer, one.version ?? -1];
  const [left, right] = [order(a), order(b)];
  const at = left.findIndex((value, i) => value !== right[i]);
  return at >= 0 && left[at] > right[at];
}
