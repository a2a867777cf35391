// `node bench/browser.mjs FOLDER`: milliseconds to decode FOLDER/delta for FOLDER/bits, and to digest, median of nine.

import { readFileSync } from "node:fs";
import { decode } from "../web/src/delta.js";
import { stateDigest } from "../web/src/digest.js";

const [folder] = process.argv.slice(2);
const bits = new Uint16Array(new Uint8Array(readFileSync(`${folder}/bits`)).buffer);
const delta = new Uint8Array(readFileSync(`${folder}/delta`));

async function median(work) {
  const times = [];
  for (let i = 0; i < 9; i++) {
    const started = performance.now();
    await work();
    times.push(performance.now() - started);
  }
  return times.sort((a, b) => a - b)[4];
}

const model = new Map([["w", { shape: [bits.length], bits }]]);
const decoded = await median(() => decode(delta, model));
const digested = await median(() => stateDigest([["w", bits]]));
console.log(JSON.stringify({ decoded, digested }));
