// Files that the project's tests write for both implementations (tests/web/vectors.py): the same ones are refused.

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import test from "node:test";
import { apply, decode } from "../src/delta.js";
import { stateDigest } from "../src/digest.js";
import { Refused } from "../src/refused.js";
import { Replica } from "../src/replica.js";
import { Missing } from "../src/store.js";

const FOLDER = process.env.DWS_VECTORS;
const options = { skip: FOLDER ? false : "tests/web/test_web.py writes the vectors and sets DWS_VECTORS" };
/** @param {string} name */
const read = (name) => JSON.parse(readFileSync(`${FOLDER}/${name}`, "utf8"));
/** @param {string} text */
const bytes = (text) => Uint8Array.from(Buffer.from(text, "base64"));

/** A sentence for people: in one line, printable and short. @param {unknown} problem */
function sentence(problem) {
  if (!(problem instanceof Refused)) throw problem;
  assert.match(problem.message, /^[\x20-\x7e…]{10,2000}$/);
}

test("whole and damaged deltas", options, async (t) => {
  const { model: given, cases } = read("deltas.json");
  // The two zstd decoders differ on damaged frames. Python takes more as a number: a version with a sign, NaN in a field
  // that nobody reads. sha256 and the manifest's entry hold for both.
  const counts = { taken: 0, refused: 0, "taken by one": 0 };
  for (const { file, digest, why } of cases) {
    const model = new Map(Object.entries(given).map(([name, { shape, bits }]) =>
      [name, { dtype: "BF16", shape, bits: new Uint16Array(bytes(bits).buffer) }]));
    let said = null;
    try {
      const { patches } = await decode(bytes(file), model);
      apply(model, patches);
      said = await stateDigest([...model].map(([name, { bits }]) => [name, bits]));
    } catch (problem) {
      sentence(problem);
      if (digest && !/compressed stream|is not a version|is not JSON|is not whole/.test(/** @type {Error} */ (problem).message)) throw problem;
      if (digest) counts["taken by one"]++;
      said = digest;
    }
    if (said && !digest) {
      assert.match(why, /zstd|compress/i);
      counts["taken by one"]++;
    } else {
      assert.equal(said, digest);
      counts[said ? "taken" : "refused"]++;
    }
  }
  t.diagnostic(JSON.stringify(counts));
  assert(counts["taken by one"] <= cases.length / 100);
});

/** Seals and hashes that fit, so that a reader gets past them. @param {Record<string, string>} files */
function sealed(files) {
  const newest = (/** @type {string} */ kind) => Object.keys(files).filter((key) => key.includes(`/${kind}/`)).sort().at(-1) ?? "";
  const sha256 = (/** @type {string | Uint8Array} */ data) => createHash("sha256").update(data).digest("hex");
  const seal = (/** @type {string} */ kind, /** @type {string} */ key, /** @type {object} */ pinned) => {
    try {
      const { seal: _, signature: __, ...record } = JSON.parse(Buffer.from(files[key], "base64").toString());
      const rest = JSON.stringify({ ...record, ...pinned });
      const text = `{"seal":"${sha256(`${kind}\n${rest}`)}","signature":"",${rest.slice(1)}`;
      files[key] = Buffer.from(text).toString("base64");
    } catch {} // it is no longer JSON
  };
  seal("Manifest", newest("manifests"), {});
  const manifest = bytes(files[newest("manifests")]);
  const head = Buffer.from(files[newest("heads")], "base64").toString();
  const key = /"key": ?"([^"]+)"/.exec(head)?.[1];
  seal("Head", newest("heads"), key ? { manifest: { key, size: manifest.length, sha256: sha256(manifest) } } : {});
  return files;
}

/** A replica of a run whose objects are these. @param {Record<string, string>} files @param {string} [run] */
function replicaOf(files, run = "forged") {
  return new Replica({
    url: "memory",
    pollSeconds: 1,
    async get(/** @type {string} */ key) {
      if (!Object.hasOwn(files, key)) throw new Missing(`${key} does not exist`);
      return bytes(files[key]);
    },
    list: async (/** @type {string} */ prefix) => Object.keys(files).filter((key) => key.startsWith(prefix)),
  }, run);
}

test("a run that two ranks published, with a jump", options, async () => {
  const files = read("parts.json");
  const replica = replicaOf(files);
  const steps = async (/** @type {number} */ version) => (await replica.goTo(version))?.moves.map(({ forward }) => forward);
  assert.equal((await replica.look())?.version, 10);
  assert.deepEqual(await steps(10), [true, true, true], "the jump and two deltas");
  for (const version of [9, 8, 0]) assert.deepEqual(await steps(version), [false]);
  for (let version = 1; version <= 10; version++) assert.deepEqual(await steps(version), [true]);
  assert.equal(await replica.digest(), replica.manifest?.digest);
});

for (const encoding of ["fast", "small"]) {
  test(`a run with tensors of every dtype, ${encoding}`, options, async () => {
    const { files, dtypes, counts, assets, newest } = read(`mixed-${encoding}.json`);
    const replica = replicaOf(files, "mixed");
    assert.equal((await replica.look())?.version, newest);
    const steps = async (/** @type {number} */ version) => (await replica.goTo(version))?.moves.map(({ forward }) => forward);
    assert.deepEqual(await steps(newest), [true, true, true], "the jump and two deltas");
    assert.equal(await replica.digest(), replica.manifest?.digest);
    const beside = await replica.at(newest - 1);
    for (const model of [replica.model, beside.model]) {
      assert.deepEqual(Object.fromEntries([...model].map(([name, { dtype }]) => [name, dtype])), dtypes);
      assert.deepEqual(Object.fromEntries([...model].map(([name, { bits }]) => [name, bits.length])), counts);
    }
    for (const [name, text] of Object.entries(assets)) assert.equal(`${Buffer.from(replica.files.get(name) ?? [])}`, text);
    for (const version of [newest - 1, newest - 2, 0]) assert.deepEqual(await steps(version), [false]);
    const digests = new Set();
    for (let version = 0; version <= newest; version++) {
      if (version) assert.deepEqual(await steps(version), [true]);
      assert.equal(await replica.digest(), replica.manifest?.digest);
      digests.add(replica.manifest?.digest);
    }
    assert.equal(digests.size, newest + 1);
  });
}

test("forged runs", options, async (t) => {
  const counts = { taken: 0, refused: 0 };
  for (const { what, files, version } of read("runs.json")) {
    const replica = replicaOf(what.startsWith("sound") ? files : sealed(files));
    let taken = null;
    try {
      const manifest = await replica.look();
      assert(manifest);
      await replica.goTo(manifest.version);
      assert.equal(await replica.digest(), manifest.digest);
      taken = manifest.version;
      counts.taken++;
    } catch (problem) {
      sentence(problem);
      counts.refused++;
    }
    if (version !== undefined) assert.equal(taken, version, what);
  }
  t.diagnostic(JSON.stringify(counts));
});
