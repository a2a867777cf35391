// A tab that follows a run for days: what it keeps does not grow with the number of versions.

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import test from "node:test";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import { stateDigest } from "../src/digest.js";
import { Replica } from "../src/replica.js";
import { Missing } from "../src/store.js";

setFlagsFromString("--expose-gc");
const collect = runInNewContext("gc");

const WORDS = 500;
const EVERY = 8; // versions between two anchors
const FOLDER = "runs/long/";
const BUDGET = 1 << 18; // bytes, of deltas and of manifests

/** @param {string | Uint8Array} data */
const sha256 = (data) => createHash("sha256").update(data).digest("hex");
/** @param {string} kind @param {number} version @param {string} ending */
const keyOf = (kind, version, ending) => `${FOLDER}${kind}/${String(version).padStart(8, "0")}.t1-00000000${ending}`;

/** @param {object} header @param {Uint8Array} data */
function safetensors(header, data) {
  const text = Buffer.from(JSON.stringify(header));
  return Buffer.concat([new Uint8Array(BigUint64Array.of(BigInt(text.length)).buffer), text, data]);
}

/** The delta of a version, by which all words grow by one. @param {number} version */
function deltaOf(version) {
  const signs = Math.ceil(WORDS / 8);
  const streams = Object.entries({ gaps: [0, 0], signs: [0, signs], large: [signs, signs], sizes: [signs, signs] });
  const entries = streams.map(([name, [start, end]]) => [`0.${name}`, { dtype: "U8", shape: [end - start], data_offsets: [start, end] }]);
  const groups = [{ mode: "gaps", gaps: [[0, 0, true, 0]], large: [[0, 0, false, 0]], sizes: [[0, 0]] }];
  const metadata = { format: "delta-weight-sync-delta/2", base: String(version - 1), version: String(version),
    groups: JSON.stringify(groups), tensors: JSON.stringify([["w", [WORDS], WORDS, 0]]) };
  return safetensors({ __metadata__: metadata, ...Object.fromEntries(entries) }, new Uint8Array(signs));
}

/** The words of a version. @param {number} version */
const wordsOf = (version) => new Uint16Array(WORDS).fill(version);

/** @param {number} version */
const anchorOf = (version) => safetensors({ w: { dtype: "BF16", shape: [WORDS], data_offsets: [0, 2 * WORDS] } },
  new Uint8Array(wordsOf(version).buffer));

/** A bucket with a run of so many versions; `newest` is the one that its HEAD names. */
class LongRun {
  url = "memory";
  pollSeconds = 1;
  newest = 0;
  /** @type {Map<string, Uint8Array>} */
  objects = new Map();

  /** @param {string} kind @param {object} fields */
  #sealed(kind, fields) {
    const text = JSON.stringify({ format: "delta-weight-sync/3", run: "long", ...fields, born: 1, writer_term: 1, writer: "0".repeat(32) });
    return Buffer.from(`{"seal":"${sha256(`${kind}\n${text}`)}","signature":"",${text.slice(1)}`);
  }

  /** @param {string} key @param {Uint8Array} data */
  #put(key, data) {
    this.objects.set(key, data);
    return { key, size: data.length, sha256: sha256(data) };
  }

  /** @param {number} versions */
  async write(versions) {
    let parent = null;
    let anchor = {};
    /** @type {object[]} */
    let deltas = [];
    for (let version = 0; version < versions; version++) {
      if (version) {
        const { size, sha256 } = this.#put(keyOf("deltas", version, ".safetensors"), deltaOf(version));
        deltas = [...deltas, [version - 1, version, WORDS, size, sha256]].slice(-EVERY);
      }
      if (version % EVERY === 0) {
        const { size, sha256 } = this.#put(keyOf("anchors", version, "/model.safetensors"), anchorOf(version));
        anchor = { version, files: [["model.safetensors", size, sha256]] };
      }
      const digest = await stateDigest([["w", wordsOf(version)]]);
      parent = this.#put(keyOf("manifests", version, ".json"), this.#sealed("Manifest", { version, sync: version, created_at: 1, digest,
        anchor, deltas, jumps: [], parent, changed: WORDS, total: WORDS, full_bytes: 2 * WORDS }));
    }
    return this;
  }

  /** @param {string} key */
  async get(key) {
    const data = key.includes("/heads/") ? this.#head() : this.objects.get(key);
    if (!data) throw new Missing(`${key} does not exist`);
    return new Uint8Array(data);
  }

  #head() {
    const key = keyOf("manifests", this.newest, ".json");
    const data = this.objects.get(key) ?? new Uint8Array();
    return this.#sealed("Head", { version: this.newest, manifest: { key, size: data.length, sha256: sha256(data) } });
  }

  /** @param {string} prefix */
  async list(prefix) {
    if (prefix === `${FOLDER}heads/`) return [`${prefix}00000001.${"0".repeat(32)}.json`];
    return [...this.objects.keys()].filter((key) => key.startsWith(prefix));
  }
}

/**
 * Count what an object leads to: objects, and the bytes of arrays of numbers.
 * @param {unknown} root
 * @param {unknown[]} others where to stop
 */
function retained(root, ...others) {
  const counts = { objects: 0, bytes: 0 };
  const seen = new Set(others);
  const left = [root];
  while (left.length) {
    const one = left.pop();
    if (typeof one !== "object" || one === null || seen.has(one)) continue;
    seen.add(one);
    counts.objects++;
    if (ArrayBuffer.isView(one)) counts.bytes += one.byteLength;
    else left.push(...(one instanceof Map ? [...one].flat() : []), ...Object.values(one));
  }
  return counts;
}

test("what a tab keeps does not grow with the number of versions, and every version is still in reach", async (t) => {
  const few = 1000;
  const many = 3000;
  const run = await new LongRun().write(many + 1);
  const replica = new Replica(run, "long");
  replica.known.budget = replica.manifests.budget = BUDGET;
  const upTo = async (/** @type {number} */ version) => {
    while (run.newest < version) {
      run.newest++;
      await replica.look();
      await replica.goTo(run.newest);
    }
    for (let times = 0; times < 2; times++) collect();
    const { heapUsed, arrayBuffers } = process.memoryUsage();
    const kept = { deltas: replica.known.size, past: replica.past.length, manifests: replica.manifests.size };
    t.diagnostic(`version ${version}: ${JSON.stringify({ ...kept, ...retained(replica, run), heapUsed, arrayBuffers })}`);
    return { ...retained(replica, run), memory: heapUsed + arrayBuffers };
  };
  const before = await upTo(few);
  const after = await upTo(many);
  assert(after.objects < 1.1 * before.objects, "objects");
  assert(after.bytes < 1.1 * before.bytes, "bytes of numbers");
  assert(after.memory < before.memory + 6e6, "without a budget, these versions take 13 MB");
  assert(replica.known.bytes <= BUDGET && replica.known.bytes > 0.9 * BUDGET);
  assert(replica.manifests.bytes <= BUDGET && replica.manifests.bytes > 0.9 * BUDGET);

  const back = replica.past.length;
  assert(back > 50);
  for (let version = many - 1; version > many - back; version--) {
    const commit = await replica.goTo(version);
    assert.deepEqual(commit?.moves.map(({ forward }) => forward), [false]);
    assert.equal(commit?.bytes, 0);
  }
  for (const version of [many - back - 100, many - back - 101, 3, 2, 0, 1, many]) { // no longer kept, so fetched again
    await replica.goTo(version);
    assert.equal(replica.manifest?.version, version);
    assert.deepEqual(replica.model.get("w")?.bits, wordsOf(version));
    await replica.at(many - version);
  }
  assert(retained(replica, run).objects < 1.1 * before.objects);
});

test("a delta larger than all that is kept is applied; the way back begins at an anchor", async () => {
  const run = await new LongRun().write(4);
  run.newest = 3;
  const replica = new Replica(run, "long");
  replica.known.budget = replica.manifests.budget = 0;
  await replica.look();
  for (const version of [1, 2, 3, 1, 2]) {
    await replica.goTo(version);
    assert.deepEqual(replica.model.get("w")?.bits, wordsOf(version));
  }
  assert.equal(replica.known.size + replica.manifests.size, 0);
});
