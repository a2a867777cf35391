// The recorded run that ships with the page, from a file server: every version by its digest, forward and back.

import assert from "node:assert/strict";
import { readdirSync, readFileSync, statSync } from "node:fs";
import { createServer } from "node:http";
import test from "node:test";
import { completed, FIRST, REST, sketched } from "../src/preview.js";
import { check, PublicKeys } from "../src/records.js";
import { Refused } from "../src/refused.js";
import { Replica, runsOf } from "../src/replica.js";
import { openBucket } from "../src/store.js";

const RUN = new URL("../run/", import.meta.url);
const PAGE = readFileSync(new URL("../index.html", import.meta.url), "utf8");
const KEY = /data-keys="([^"]+)"/.exec(PAGE)?.[1] ?? "";

/**
 * A file server of the recorded run.
 * @param {import("node:test").TestContext} t
 * @param {(path: string, data: Buffer) => Buffer | null} change what it sends instead; null for 404
 */
async function served(t, change = (_, data) => data) {
  const server = createServer((request, response) => {
    const path = decodeURIComponent((request.url ?? "").slice(1));
    /** @type {Buffer | null} */
    let data = null;
    try {
      const place = new URL(path, RUN);
      const names = () => readdirSync(place, { withFileTypes: true }).map((one) => one.name + (one.isDirectory() ? "/" : ""));
      data = change(path, statSync(place).isDirectory()
        ? Buffer.from(names().map((name) => `<li><a href="${encodeURI(name)}">${name}</a>`).join("\n"))
        : readFileSync(place));
    } catch {}
    response.writeHead(data ? 200 : 404).end(data ?? "");
  });
  await new Promise((done) => server.listen(0, "127.0.0.1", () => done(null)));
  t.after(() => server.close());
  const { port } = /** @type {import("node:net").AddressInfo} */ (server.address());
  return openBucket(`http://127.0.0.1:${port}/`);
}

test("from the newest version to version 0 and forward, by digest", async (t) => {
  const bucket = await served(t);
  assert.deepEqual(await runsOf(bucket), ["demo"]);
  const replica = new Replica(bucket, "demo", new PublicKeys(KEY));
  const newest = (await replica.look())?.version ?? 0;
  assert(newest >= 19);
  assert.equal(replica.signer, KEY);
  assert.equal(await replica.look(), null);
  const versions = await replica.versions();
  assert.deepEqual(versions, Array.from({ length: newest + 1 }, (_, i) => i));
  const digests = new Set();
  for (const version of [newest, 3, 0, ...versions, newest - 5, newest]) {
    await replica.goTo(version);
    assert.equal(replica.manifest?.version, version);
    assert.equal(await replica.digest(), replica.manifest?.digest);
    digests.add(await replica.digest());
  }
  assert.equal(digests.size, versions.length);
  const commit = await replica.goTo(newest - 1);
  assert.deepEqual(commit?.moves.map(({ forward }) => forward), [false]);
  assert.equal(commit?.bytes, 0);
});

test("a server that lists folders needs no keys.json; a run that nobody signed is refused", async (t) => {
  const bucket = await served(t, (path, data) => (path === "keys.json" ? null : data));
  assert.deepEqual(await runsOf(bucket), ["demo"]);
  const replica = new Replica(bucket, "demo", new PublicKeys(`ed25519_public_${"1".repeat(64)}`));
  await assert.rejects(replica.look(), /is not signed by a key that this page trusts/);
});

test("without HEAD the manifests are enough", async (t) => {
  const replica = new Replica(await served(t, (path, data) => (path.includes("/heads/") ? null : data)), "demo", new PublicKeys(KEY));
  assert.equal((await replica.look())?.version, 19);
});

const ANCHOR = new URL(`runs/demo/anchors/${readdirSync(new URL("runs/demo/anchors/", RUN))[0]}/`, RUN);
const parts = [FIRST, REST].map((name) => new Uint8Array(readFileSync(new URL(name, ANCHOR))));
const WHOLE = `${ANCHOR.pathname.slice(RUN.pathname.length)}model.safetensors`;
const keys = JSON.parse(readFileSync(new URL("keys.json", RUN), "utf8"));
/** @param {string[]} listed */
const asList = (listed) => Buffer.from(JSON.stringify(listed));

test("the two files of a preview are the published model.safetensors", async (t) => {
  const replica = new Replica(await served(t), "demo", new PublicKeys(KEY));
  const [ref] = (await replica.look())?.anchor.files ?? [];
  assert.equal(ref.key, WHOLE);
  assert.equal(/data-first="([^"]+)"/.exec(PAGE)?.[1], WHOLE.replace("model.safetensors", FIRST));
  const preview = await sketched(parts[0], ref.size);
  await check(ref, completed(preview, parts[1]));
  /** @type {import("../src/replica.js").Model | undefined} */
  let shown;
  replica.onPreview = ({ model }, version, left) => {
    shown = model;
    assert.equal(version, 0);
    assert(left > parts[1].length - 1000);
  };
  await replica.goTo(0);
  for (const [name, { bits }] of replica.model) {
    const sketch = shown?.get(name)?.bits ?? [];
    assert(bits.every((one, i) => one >> 6 === sketch[i] >> 6), name);
  }
});

test("a bucket without a preview is joined from the whole file, and so is one with a damaged preview", async (t) => {
  const whole = Buffer.from(completed(await sketched(parts[0], 2048520), parts[1]));
  for (const [listed, damaged] of /** @type {[string[], string][]} */ ([
    [[...keys.filter((/** @type {string} */ key) => !/(first|rest)\.safetensors/.test(key)), WHOLE], ""],
    [[...keys, WHOLE], FIRST],
    [[...keys, WHOLE], REST],
  ])) {
    let previews = 0;
    const bucket = await served(t, (path, data) => {
      if (path === "keys.json") return asList(listed);
      if (damaged && path.endsWith(damaged)) data[data.length - 1] ^= 1;
      return path === WHOLE ? whole : data;
    });
    const get = bucket.get.bind(bucket);
    bucket.get = async (key, limit) => (key === WHOLE ? new Uint8Array(whole) : get(key, limit));
    const replica = new Replica(bucket, "demo");
    replica.onPreview = () => previews++;
    await replica.look();
    await replica.goTo(3);
    assert.equal(await replica.digest(), replica.manifest?.digest);
    assert.equal(previews, Number(damaged !== ""));
  }
});

for (const [what, part, change, sentence] of /** @type {[string, string, (data: Buffer) => Buffer, RegExp][]} */ ([
  ["a delta", "deltas/00000004", flipped, /deltas\/00000004\..* is not the published object/],
  ["the first file of a preview", FIRST, flipped, /model\.safetensors is not the published object/],
  ["the second file of a preview", REST, flipped, /model\.safetensors is not the published object/],
  ["a preview that is cut off", FIRST, (data) => data.subarray(0, 5000), /first\.safetensors was refused: /],
  ["a preview of another format", FIRST, () => Buffer.from(parts[1]), /first\.safetensors was refused: it has no stream "head"/],
  ["a second file of another size", REST, () => shorter(), /rest\.safetensors was refused: its stream has another size/],
])) {
  test(`${what}: nothing changes`, async (t) => {
    const bucket = await served(t, (path, data) => (path.includes(part) ? change(data) : data));
    const replica = new Replica(bucket, "demo");
    await replica.look();
    const before = what === "a delta" ? (await replica.goTo(3))?.digest : undefined;
    await assert.rejects(replica.goTo(4), (problem) => problem instanceof Refused && sentence.test(problem.message));
    if (before) assert.equal(await replica.digest(), before);
    assert.equal(replica.manifest?.version, before && 3);
  });
}

/** @param {Buffer} data */
function flipped(data) {
  data[data.length - 1] ^= 1;
  return data;
}

/** A second file of three bytes. */
function shorter() {
  const header = `{"low":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"__metadata__":{"format":"delta-weight-sync-preview/1"}}`;
  const length = Buffer.alloc(8);
  length.writeUInt32LE(header.length);
  return Buffer.concat([length, Buffer.from(header), Buffer.alloc(3)]);
}

test("weights that are not those of the manifest are not taken", async (t) => {
  const replica = new Replica(await served(t), "demo");
  await replica.look();
  await replica.goTo(5);
  /** @type {{bits: Uint16Array}} */ (replica.model.values().next().value).bits[7] ^= 1;
  await assert.rejects(replica.goTo(6), /version 6 was not taken: the weights have the digest/);
});
