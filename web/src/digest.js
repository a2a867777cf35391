// The state digest of docs/wire-format.md: the sum of r(tensor, place) * word, modulo 2^64.

const WORD = (1n << 64n) - 1n;
const ROW = 4096;

/** @param {bigint} i */
function mix(i) {
  let z = (i * 0x9e3779b97f4a7c15n) & WORD;
  z = ((z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n) & WORD;
  z = ((z ^ (z >> 27n)) * 0x94d049bb133111ebn) & WORD;
  return z ^ (z >> 31n);
}

// The factor of a place in its row has 32 bits. Its halves times 16 bits, summed over a row, are exact as floats.
const LOW = new Float64Array(ROW);
const HIGH = new Float64Array(ROW);
for (let i = 0; i < ROW; i++) {
  const factor = Number(mix(BigInt(i)) & 0xffffffffn) | 1;
  LOW[i] = factor & 0xffff;
  HIGH[i] = factor >>> 16;
}

/**
 * The digest of all weights, as manifests carry it.
 * @param {Iterable<[string, Uint16Array]>} weights 16-bit words by the tensor's name
 */
export async function stateDigest(weights) {
  let total = 0n;
  for (const [name, bits] of weights) {
    const hash = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(name));
    const seed = new DataView(hash).getBigUint64(0, true);
    for (let start = 0, row = 0n; start < bits.length; start += ROW, row++) {
      const end = Math.min(start + ROW, bits.length);
      let low = 0;
      let high = 0;
      for (let i = start; i < end; i++) {
        low += LOW[i - start] * bits[i];
        high += HIGH[i - start] * bits[i];
      }
      total += (mix((seed + row) & WORD) | 1n) * ((BigInt(high) << 16n) + BigInt(low));
    }
  }
  return (total & WORD).toString(16).padStart(16, "0");
}
