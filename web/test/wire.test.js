// docs/wire-format.md by its own examples: their hex is on the page, and the project's Python writes it there.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";
import { apply, decode, undo } from "../src/delta.js";
import { stateDigest } from "../src/digest.js";
import { parse } from "../src/records.js";

const PAGE = readFileSync(new URL("../../docs/wire-format.md", import.meta.url), "utf8");

/** @param {string} name */
function example(name) {
  const text = new RegExp(`<!-- wire:${name} -->\\n\`\`\`text\\n([^]*?)\\n\`\`\``).exec(PAGE)?.[1];
  assert(text, name);
  return text;
}

/** @param {string} digits */
const unhex = (digits) => Uint8Array.from(digits.match(/[0-9a-f]{2}/g) ?? [], (pair) => parseInt(pair, 16));

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
      const model = new Map([["w", { shape: JSON.parse(shape), bits }]]);
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
