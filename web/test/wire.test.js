// docs/wire-format.md by its own examples: their hex is on the page, and the project's Python writes it there.

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import test from "node:test";
import { apply, decode, DTYPES, undo } from "../src/delta.js";
import { stateDigest } from "../src/digest.js";
import { weightsOf } from "../src/preview.js";
import { nameOf, parse } from "../src/records.js";

const PAGE = readFileSync(new URL("../../docs/wire-format.md", import.meta.url), "utf8");

/** @param {string} name */
function example(name) {
  const text = new RegExp(`<!-- wire:${name} -->\\n\`\`\`text\\n([^]*?)\\n\`\`\``).exec(PAGE)?.[1];
  assert(text, name);
  return text;
}

/** @param {string} digits */
const unhex = (digits) => Uint8Array.from(digits.match(/[0-9a-f]{2}/g) ?? [], (pair) => parseInt(pair, 16));

/**
 * A safetensors file with a tensor w.
 * @param {string} dtype
 * @param {number[]} shape
 * @param {Uint8Array} data
 */
function fileOf(dtype, shape, data) {
  const header = new TextEncoder().encode(JSON.stringify({ w: { dtype, shape, data_offsets: [0, data.length] } }));
  const length = new Uint8Array(new BigUint64Array([BigInt(header.length)]).buffer);
  return new Uint8Array([...length, ...header, ...data]);
}

for (const part of example("words").split("\n\n")) {
  const [, dtype, shape, digits, words, patterns, digest] =
    /^w is (\w+) (\[.*?\]) .*\n +bytes +(.*)\n +words (\[.*?\]) +(.*)\n +digest +(\w+)$/.exec(part) ?? [];
  test(`the words of ${dtype}`, async () => {
    const model = weightsOf(fileOf(dtype, JSON.parse(shape), unhex(digits)));
    const bits = patterns.split(" ").map((one) => parseInt(one, 16));
    assert.deepEqual([...model], [["w", { dtype, shape: JSON.parse(words), bits: Uint16Array.from(bits) }]]);
    assert.equal(await stateDigest([["w", Uint16Array.from(bits)]]), digest);
  });
}

test("the page's table of dtypes is what is read", () => {
  const rows = [...PAGE.matchAll(/^\| (`[A-Z0-9`, ]+`) \| ([0-9]) \| .* \| `(.*)` \|$/gm)];
  const listed = rows.flatMap(([, dtypes, size, shape]) => dtypes.split(", ").map((name) => [name.slice(1, -1), Number(size), shape]));
  assert.deepEqual(Object.fromEntries(listed.map(([dtype, size]) => [dtype, size])), DTYPES);
  for (const [dtype, size, shape] of /** @type {[string, number, string][]} */ (listed)) {
    const tensor = weightsOf(fileOf(dtype, [3, 4], new Uint8Array(12 * size))).get("w");
    assert.deepEqual(tensor?.shape, JSON.parse(shape), dtype);
    assert.equal(tensor?.bits.length, tensor?.shape.reduce((all, side) => all * side));
  }
  assert.throws(() => weightsOf(fileOf("F8_E4M3", [3], new Uint8Array(3))), /tensor "w" has the dtype "F8_E4M3", which no version has/);
});

test("an element of one byte stays one, forward and back", () => {
  for (const [dtype, old, above] of /** @type {[string, number[], number[]][]} */ ([
    ["U8", [250, 3], [4, 249]], ["I8", [250, 3], [4, 249]], ["BOOL", [1, 0], [11, 246]], ["BF16", [65530, 3], [4, 65529]],
  ])) {
    const model = new Map([["w", { dtype, shape: [2], bits: Uint16Array.from(old) }]]);
    const patches = [{ name: "w", places: Uint32Array.of(0, 1), steps: Uint16Array.of(10, 65526) }];
    apply(model, patches);
    assert.deepEqual([...(model.get("w")?.bits ?? [])], above, dtype);
    undo(model, patches);
    assert.deepEqual([...(model.get("w")?.bits ?? [])], old, dtype);
  }
});

test("the name of an anchor's file is its path in the checkpoint's folder", () => {
  const folder = "runs/demo/anchors/00000000.t1-5ad0b5d1";
  for (const [key, name] of [
    [`${folder}/config.json`, "config.json"],
    [`${folder}/additional_chat_templates/tool_use.jinja`, "additional_chat_templates/tool_use.jinja"],
    [`${folder}/a/anchors/b`, "a/anchors/b"],
    ["runs/anchors/deltas/00000001.t1-5ad0b5d1.safetensors", "00000001.t1-5ad0b5d1.safetensors"],
    ["runs/demo/state/anchors/b/c", "c"],
    ["runs/demo/anchors/b", "b"],
  ]) {
    assert.equal(nameOf({ key, size: 0, sha256: "" }), name);
  }
});

test("HEAD and its seal", async () => {
  const wrapped = example("head").replace(/\n  /g, "\n").split("\nits seal")[0];
  const [key, ...lines] = wrapped.split("\n");
  const text = lines.join("");
  const head = await parse("Head", new TextEncoder().encode(text), key);
  assert.equal(head.version, 7);
  const forged = text.replace('"version":7', '"version":8');
  await assert.rejects(parse("Head", new TextEncoder().encode(forged), key), /its seal does not match/);
  const more = text.replace("{", '{"more":1,');
  await assert.rejects(parse("Head", new TextEncoder().encode(more), key), /"more" is missing, wrong or unknown/);
});

test("the keys and names of runs that Python takes", async () => {
  const table = JSON.parse(readFileSync(new URL("keys.json", import.meta.url), "utf8"));
  const shared = { format: "delta-weight-sync/3", born: 1, version: 0, writer_term: 1, writer: "0".repeat(32) };
  const taken = async (/** @type {unknown} */ run, /** @type {unknown} */ key) => {
    const text = JSON.stringify({ ...shared, run, manifest: { key, size: 1, sha256: "0".repeat(64) } });
    const seal = createHash("sha256").update(`Head\n${text}`).digest("hex");
    const data = new TextEncoder().encode(`{"seal":"${seal}","signature":"",${text.slice(1)}`);
    return parse("Head", data, "head").then(() => true, ({ message }) => {
      assert.match(message, /its field "(run|manifest)" is missing, wrong or unknown/);
      return false;
    });
  };
  for (const [key, good] of table.keys) assert.equal(await taken("demo", key), good, JSON.stringify(key));
  for (const [run, good] of table.runs) assert.equal(await taken(run, "a"), good, JSON.stringify(run));
});

test("digests", async () => {
  const small = Uint16Array.of(0x3f80, 0, 0x8000);
  /** @type {[string, Uint16Array][][]} */
  const states = [
    [["w", new Uint16Array(3)]],
    [["w", small]],
    [["v", small]],
    [["w", small], ["v", small]],
    [["w", Uint16Array.from({ length: 5000 }, (_, i) => i)]],
  ];
  const said = example("digest").split("\n").map((line) => line.slice(-16));
  assert.deepEqual(await Promise.all(states.map(stateDigest)), said);
});

/** The steps that the page lists: all, or the first ones. @param {string} text */
const listed = (text) => [...text.matchAll(/(\d+):([+-]\d+)/g)].map(([, at, step]) => [Number(at), Number(step)]);

for (const [place, old] of /** @type {[string, (mode: string) => number[]][]} */ ([
  ["gaps", () => new Array(64).fill(0x3c00)],
  ["bands", () => Array.from({ length: 256 }, (_, i) => (i % 2 ? 0x3a80 : 0x3f80))],
  ["planes", (mode) => Array.from({ length: 512 }, (_, i) => (mode === "raw" ? Number((BigInt(i) * 2654435761n >> 7n) & 65535n) : 0x3c00))],
])) {
  for (const part of example(place).split("\n\n")) {
    const [, mode, shape] = /^(\w+): w has shape (\[[\d, ]+\])/.exec(part) ?? [];
    test(`the example of ${mode}`, async () => {
      const bits = Uint16Array.from(old(mode));
      const model = new Map([["w", { dtype: "BF16", shape: JSON.parse(shape), bits }]]);
      const delta = await decode(file(part), model);
      const [{ places, steps }] = delta.patches;
      const shown = listed(part.split("the file,")[0].replace(/\n  /g, ""));
      const found = [...places].map((at, i) => [at, steps[i] << 16 >> 16]);
      assert.deepEqual(found.slice(0, shown.length), shown);
      assert.deepEqual([delta.base, delta.version], [6, 7]);
      apply(model, delta.patches);
      assert.equal(bits[places[0]], (old(mode)[places[0]] + steps[0]) & 65535);
      undo(model, delta.patches);
      assert.deepEqual([...bits], old(mode));
    });
  }
}

/** Put the file of an example together from what the page shows of it. @param {string} part */
function file(part) {
  const [, length, header, spaces, streams] =
    /header ([0-9a-f ]{23}), header\n([^]*?)\nand (\d+) spaces; then\n([^]*)/.exec(part) ?? [];
  const text = header.split("\n").map((line) => line.slice(2)).join("") + " ".repeat(Number(spaces));
  const content = streams.split("\n")
    .reduce((/** @type {string[]} */ lines, line) =>
      /^  {1,3}(bits|unpacked)/.test(line) ? [...lines, "#"]
        : /^  \d\.\w+ /.test(line) ? [...lines, line.slice(14)]
          : lines.at(-1)?.startsWith("#") ? lines : [...lines.slice(0, -1), lines.at(-1) + line.slice(2)], [])
    .filter((line) => !line.startsWith("#") && !line.includes("(empty)"));
  return new Uint8Array([...unhex(length), ...new TextEncoder().encode(text), ...unhex(content.join(" "))]);
}
