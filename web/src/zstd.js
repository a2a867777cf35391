// Decodes zstd frames with fzstd, which `npm install` puts into vendor/. Most deltas have no such frame.

import { demand, Refused } from "./refused.js";

/** @type {((frame: Uint8Array, into: Uint8Array) => Uint8Array) | undefined} */
let decompress;

/** Load the decoder, before `unpacked` is called. */
export async function loadZstd() {
  try {
    decompress ??= (await import(new URL("../vendor/fzstd.mjs", import.meta.url).href)).decompress;
  } catch {
    throw new Refused("This delta needs the zstd decoder: run `npm install` in the folder of this page.");
  }
}

/**
 * @param {Uint8Array} frame
 * @param {number} size bytes that the frame must hold, by its own header
 */
export function unpacked(frame, size) {
  const sentence = `a compressed stream does not hold ${size} bytes`;
  demand(contentSize(frame) === size, sentence);
  demand(decompress, "the zstd decoder is not loaded");
  let content;
  try {
    content = decompress(frame, new Uint8Array(size));
  } catch (error) {
    throw new Refused(`a compressed stream is damaged (${/** @type {Error} */ (error).message})`);
  }
  demand(content.length === size, sentence);
  return content;
}

/**
 * The size that a frame's header states (RFC 8878); undefined if it states none.
 * @param {Uint8Array} frame
 */
function contentSize(frame) {
  const view = new DataView(frame.buffer, frame.byteOffset, frame.byteLength);
  if (frame.length < 5 || view.getUint32(0, true) !== 0xfd2fb528) return undefined;
  const descriptor = frame[4];
  const single = (descriptor >> 5) & 1;
  const at = 5 + (single ? 0 : 1) + [0, 1, 2, 4][descriptor & 3];
  const bytes = [single, 2, 4, 8][descriptor >> 6];
  if (!bytes || at + bytes > frame.length) return undefined;
  if (bytes === 8) return Number(view.getBigUint64(at, true));
  return bytes === 1 ? frame[at] : bytes === 2 ? view.getUint16(at, true) + 256 : view.getUint32(at, true);
}
