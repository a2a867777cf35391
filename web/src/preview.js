// A preview of an anchor: its weights in two files. The first is enough to play; together they give model.safetensors.

import { DTYPES, safetensors } from "./delta.js";
import { demand, quoted } from "./refused.js";
import { concatenated } from "./store.js";

/** @typedef {import("./delta.js").Model} Model */
/** @typedef {{model: Model, files: Map<string, Uint8Array>, head: Uint8Array, bits: Uint16Array}} Preview */

export const FIRST = "first.safetensors";
export const REST = "rest.safetensors";
const FORMAT = "delta-weight-sync-preview/1";
const LARGEST_FILE = 1 << 20; // bytes of a small file, such as the tokenizer's
const SLICE = 1 << 15; // bytes that are inflated before the size is checked again
const LOW = 0x3f; // the bits of a weight that are in the second file
const MIDDLE = 0x20; // what these bits are taken for until that file has come

/**
 * The words of the tensors of a checkpoint's file. An element of more than 16 bits is several words, the lowest first, in a
 * last dimension of their own.
 * @param {Uint8Array} file
 * @returns {Model}
 */
export function weightsOf(file) {
  /** @type {Model} */
  const model = new Map();
  for (const [name, { dtype, shape, data }] of safetensors(file).tensors) {
    const size = Object.hasOwn(DTYPES, dtype) ? DTYPES[dtype] : NaN;
    demand(size, `the anchor's tensor ${quoted(name)} has the dtype ${quoted(dtype)}, which no version has`);
    const bits = size === 1 ? Uint16Array.from(data) : new Uint16Array(data.slice().buffer);
    model.set(name, { dtype, shape: size > 2 ? [...shape, size / 2] : shape, bits });
  }
  return model;
}

/**
 * The streams of one of the two files.
 * @param {Uint8Array} file
 */
function streamsOf(file) {
  const { metadata, tensors } = safetensors(file);
  demand(metadata.format === FORMAT, `its format is ${quoted(metadata.format)}, not ${FORMAT}`);
  return (/** @type {string} */ name) => {
    const found = tensors.get(name);
    demand(found?.dtype === "U8", `it has no stream ${quoted(name)}`);
    return found.data;
  };
}

/**
 * @param {Uint8Array} data a zlib stream
 * @param {number} limit the most bytes that it may hold
 */
async function inflated(data, limit) {
  const parts = [];
  let size = 0;
  const { readable, writable } = new DecompressionStream("deflate");
  const reader = readable.getReader();
  const feed = async () => {
    const writer = writable.getWriter();
    for (let at = 0; at < data.length; at += SLICE) {
      await writer.write(/** @type {Uint8Array<ArrayBuffer>} */ (data.subarray(at, at + SLICE)));
    }
    await writer.close();
  };
  feed().catch(() => {}); // the reader sees the problem
  for (;;) {
    const part = await reader.read().catch(() => demand(false, "a compressed stream is damaged"));
    if (!part?.value) break;
    size += part.value.length;
    if (size > limit) reader.cancel().catch(() => {});
    demand(size <= limit, `a compressed stream holds more than ${limit} bytes`);
    parts.push(part.value);
  }
  return concatenated(parts);
}

/** The bytes of a checkpoint's file. @param {Uint8Array} head @param {Uint16Array} bits */
const joined = (head, bits) => concatenated([head, new Uint8Array(bits.buffer)]);

/**
 * Read the first file: each weight's sign, exponent and highest bit of the mantissa, and the small files of the anchor.
 * @param {Uint8Array} file
 * @param {number} size bytes of the anchor's model.safetensors
 * @returns {Promise<Preview>}
 */
export async function sketched(file, size) {
  const stream = streamsOf(file);
  const head = await inflated(stream("head"), size);
  const count = (size - head.length) / 2;
  const [exponents, tops] = [await inflated(stream("exponents"), count), stream("tops")];
  demand(Number.isInteger(count) && exponents.length === count && tops.length === Math.ceil(count / 4),
    `its streams are not those of a model.safetensors of ${size} bytes`);
  const bits = new Uint16Array(count);
  for (let i = 0; i < count; i++) {
    const top = tops[i >> 2] >> (2 * (i & 3));
    bits[i] = ((top & 2) << 14) | (exponents[i] << 7) | ((top & 1) << 6) | MIDDLE;
  }
  const files = new Map();
  for (const name of ["config.json", "tokenizer.json"]) files.set(name, await inflated(stream(name), LARGEST_FILE));
  return { model: weightsOf(joined(head, bits)), files, head, bits };
}

/**
 * The anchor's model.safetensors, from the preview and the second file.
 * @param {Preview} preview
 * @param {Uint8Array} file
 */
export function completed({ head, bits }, file) {
  const low = streamsOf(file)("low");
  demand(low.length === 3 * Math.ceil(bits.length / 4), "its stream has another size than that of the first file");
  const whole = new Uint16Array(bits.length);
  for (let i = 0, at = 0; i < bits.length; i += 4, at += 3) {
    const four = low[at] | (low[at + 1] << 8) | (low[at + 2] << 16);
    for (let j = 0; j < 4; j++) whole[i + j] = (bits[i + j] & ~LOW) | ((four >> (6 * j)) & LOW); // an index beyond the end stores nothing
  }
  return joined(head, whole);
}
