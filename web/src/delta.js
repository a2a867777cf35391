// Reads delta files, as docs/wire-format.md defines them: the changes from one version to the next.

import { demand, quoted, Refused } from "./refused.js";
import { loadZstd, unpacked } from "./zstd.js";

/**
 * The 16-bit words of each tensor, by its name; `shape` is that of the words. Elements of one byte are words, too, from 0
 * to 255.
 * @typedef {Map<string, {dtype: string, shape: number[], bits: Uint16Array}>} Model
 */
/** @typedef {{name: string, places: Uint32Array, steps: Uint16Array}} Patch one tensor's changes, in order */
/** @typedef {{base: number, version: number, patches: Patch[]}} Delta */
/** @typedef {[events: number, k: number, flipped: boolean, bits: number]} Row of `gaps` and `large` */
/** @typedef {{mode: string, limits: number[], gaps: Row[], large: Row[], sizes: [number, number][]}} Group */
/** @typedef {{name: string, changes: number, bits: Uint16Array}} Changed */

const FORMAT = "delta-weight-sync-delta/2";
const GROUP_FULL = 2 ** 25; // words
const LARGEST_STREAM = 2 ** 28; // bytes: the place of a bit is then a 31-bit number
const LARGEST_HEADER = 100e6; // bytes, as in the safetensors library
/** The dtypes that a version's tensors may have, and the bytes of an element. @type {Record<string, number>} */
export const DTYPES = { BF16: 2, F16: 2, F32: 4, F64: 8, I64: 8, I32: 4, I16: 2, I8: 1, U64: 8, U32: 4, U16: 2, U8: 1, BOOL: 1 };
/** Those of any safetensors file. @type {Record<string, number>} */
const BYTES = { ...DTYPES, F8_E4M3: 1, F8_E5M2: 1 };

/** For each mode, the number of entries of each list, and the names of the streams. */
const MODES = {
  gaps: { limits: 0, gaps: 1, large: 1, sizes: 1, streams: ["gaps", "signs", "large", "sizes"] },
  bands: { limits: 7, gaps: 8, large: 8, sizes: 8, streams: ["gaps", "signs", "large", "sizes"] },
  mask: { limits: 0, gaps: 0, large: 1, sizes: 1, streams: ["mask", "signs", "large", "sizes"] },
  dense: { limits: 0, gaps: 0, large: 0, sizes: 0, streams: ["low", "high"] },
  raw: { limits: 0, gaps: 0, large: 0, sizes: 0, streams: ["low", "high"] },
};

/**
 * The header and the tensors of a safetensors file.
 * @param {Uint8Array} file
 * @returns {{metadata: Record<string, string>, tensors: Map<string, {dtype: string, shape: number[], data: Uint8Array}>}}
 */
export function safetensors(file) {
  demand(file.length >= 8, "it is too short for a safetensors file");
  const length = Number(new DataView(file.buffer, file.byteOffset, 8).getBigUint64(0, true));
  demand(length <= LARGEST_HEADER && 8 + length <= file.length, "its header is longer than the file");
  const { __metadata__: metadata = {}, ...entries } = json(file.subarray(8, 8 + length), "its header");
  demand(record(metadata) && Object.values(metadata).every((value) => typeof value === "string"),
    "its metadata holds something other than strings");
  const body = file.subarray(8 + length);
  const tensors = new Map();
  const parts = [];
  for (const [name, entry] of Object.entries(entries)) {
    const { dtype, shape, data_offsets: place } = record(entry) ? entry : {};
    demand(typeof dtype === "string" && counts(shape) && counts(place, 2) && place[0] <= place[1],
      `the header says nothing usable of ${quoted(name)}`);
    const size = shape.reduce((product, side) => product * side, BYTES[dtype] ?? NaN);
    demand(size === place[1] - place[0], `the header gives ${quoted(name)} a shape that its bytes do not have`);
    tensors.set(name, { dtype, shape, data: body.subarray(place[0], place[1]) });
    parts.push(place);
  }
  let end = 0;
  for (const [start, stop] of parts.sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
    demand(start === end, "its tensors overlap, or leave a gap");
    end = stop;
  }
  demand(end === body.length, "its tensors do not fill the file");
  return { metadata, tensors };
}

/**
 * Decode a delta file. Nothing changes until `apply`.
 * @param {Uint8Array} file
 * @param {Model} model at the delta's base
 * @returns {Promise<Delta>}
 */
export async function decode(file, model) {
  const { metadata, tensors: streams } = safetensors(file);
  demand(metadata.format === FORMAT, `its format is ${quoted(metadata.format)}, not ${FORMAT}`);
  const [base, version] = [metadata.base, metadata.version].map(decimal);
  for (const [name, { dtype, shape }] of streams) {
    demand(dtype === "U8" && shape.length === 1, `stream ${quoted(name)} is not bytes`);
  }
  const groups = groupsOf(metadata.groups);
  const members = membersOf(metadata.tensors, groups.length, model);
  if (groups.some(({ mode }) => ["mask", "dense", "raw"].includes(mode))) await loadZstd();
  const patches = groups.flatMap((group, at) => {
    const own = Object.fromEntries(modeOf(group.mode).streams.map((name) => {
      const stream = streams.get(`${at}.${name}`);
      demand(stream, `it has no stream ${at}.${name}`);
      return [name, stream.data];
    }));
    return group.mode === "dense" || group.mode === "raw"
      ? planes(group.mode, members[at], own)
      : marked(group, members[at], own);
  });
  return { base, version, patches };
}

/**
 * Take a model from the delta's base to its version, in place.
 * @param {Model} model
 * @param {Patch[]} patches
 */
export function apply(model, patches) {
  for (const { name, places, steps } of patches) {
    const { bits, mask } = words(model, name);
    for (let i = 0; i < places.length; i++) bits[places[i]] = (bits[places[i]] + steps[i]) & mask;
  }
}

/**
 * Take a model from the delta's version back to its base, in place.
 * @param {Model} model
 * @param {Patch[]} patches
 */
export function undo(model, patches) {
  for (const { name, places, steps } of patches) {
    const { bits, mask } = words(model, name);
    for (let i = 0; i < places.length; i++) bits[places[i]] = (bits[places[i]] - steps[i]) & mask;
  }
}

/**
 * A tensor's words, and the bits that an element can have: a checkpoint's file has only eight of a one-byte element.
 * @param {Model} model
 * @param {string} name
 */
function words(model, name) {
  const { dtype, bits } = /** @type {{dtype: string, bits: Uint16Array}} */ (model.get(name));
  return { bits, mask: DTYPES[dtype] === 1 ? 0xff : 0xffff };
}

/** @param {string} mode */
const modeOf = (mode) => MODES[/** @type {keyof typeof MODES} */ (mode)];

/** @param {unknown} text @returns {number} */
function decimal(text) {
  demand(typeof text === "string" && /^\d{1,20}$/.test(text), `${quoted(text)} is not a version`);
  return Number(text);
}

/** @param {unknown} value @returns {value is Record<string, any>} */
const record = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** @param {unknown} value @returns {value is number} */
const count = (value) => Number.isSafeInteger(value) && /** @type {number} */ (value) >= 0;

/** @param {unknown} value @param {number} [length] @returns {value is number[]} */
const counts = (value, length) =>
  Array.isArray(value) && value.length === (length ?? value.length) && value.every(count);

/**
 * Parse JSON whose numbers are integers. 1.0 is refused, because not every reader takes it for 1.
 * @param {Uint8Array | string} content
 * @param {string} what
 * @returns {any}
 */
function json(content, what) {
  try {
    const text = typeof content === "string" ? content : new TextDecoder("utf-8", { fatal: true }).decode(content);
    demand(!/\d[.eE]/.test(text.replace(/"(?:[^"\\]|\\.)*"/g, '""')), `${what} has a number that is not whole`);
    const value = JSON.parse(text);
    demand(typeof value === "object" && value !== null, `${what} is no list or table`);
    return value;
  } catch (error) {
    if (error instanceof Refused) throw error;
    throw new Refused(`${what} is not JSON`);
  }
}

/** @param {string} text @returns {Group[]} */
function groupsOf(text) {
  const groups = json(text ?? "", "its list of groups");
  demand(Array.isArray(groups), "its list of groups is no list");
  return groups.map((given, at) => {
    demand(record(given), `group ${at} is no table`);
    const { mode, limits = [], gaps = [], large = [], sizes = [] } = given;
    demand(Object.hasOwn(MODES, mode), `group ${at} has the mode ${quoted(mode)}`);
    const lists = { limits, gaps, large, sizes };
    for (const [field, list] of Object.entries(lists)) {
      demand(Array.isArray(list) && list.length === modeOf(mode)[/** @type {keyof typeof lists} */ (field)],
        `the lists of a group of mode ${mode} have other lengths than ${field} of group ${at}`);
    }
    demand(limits.every((/** @type {unknown} */ one, /** @type {number} */ i) =>
      count(one) && one <= 255 && (i === 0 || limits[i - 1] <= one)), `the limits of group ${at} do not ascend`);
    for (const row of [...gaps, ...large]) {
      demand(Array.isArray(row) && row.length === 4 && typeof row[2] === "boolean" && counts([row[0], row[1], row[3]])
        && row[1] <= 40 && row[0] * (row[1] + 1) <= row[3], `group ${at} has the section ${quoted(row)}`);
    }
    for (const row of sizes) {
      demand(counts(row, 2) && row[0] <= 14, `group ${at} has the section of sizes ${quoted(row)}`);
    }
    return { mode, ...lists };
  });
}

/**
 * The tensors of each group.
 * @param {string} text
 * @param {number} groups
 * @param {Model} model
 */
function membersOf(text, groups, model) {
  const rows = json(text ?? "", "its list of tensors");
  demand(Array.isArray(rows), "its list of tensors is no list");
  /** @type {Changed[][]} */
  const members = Array.from({ length: groups }, () => []);
  const full = new Array(groups).fill(0);
  const seen = new Set();
  for (const row of rows) {
    demand(Array.isArray(row) && row.length === 4, "a row of its list of tensors has not four entries");
    const [name, shape, changes, group] = row;
    const known = model.get(name);
    demand(known && counts(shape) && shape.join() === known.shape.join(),
      `it changes ${quoted(name)} ${quoted(shape)}, which the model does not have`);
    demand(!seen.has(name), `it changes ${quoted(name)} twice`);
    seen.add(name);
    demand(count(changes) && changes >= 1 && changes <= known.bits.length,
      `it says that ${quoted(changes)} words of ${quoted(name)} change`);
    demand(count(group) && group < groups, `it has ${groups} groups, and names group ${quoted(group)}`);
    demand(full[group] < GROUP_FULL, `group ${group} continues after ${GROUP_FULL} words`);
    full[group] += known.bits.length;
    members[group].push({ name, changes, bits: known.bits });
  }
  demand(members.every((one) => one.length), `it has ${groups} groups, but its tensors name others`);
  return members;
}

/**
 * Count the zero bits from `at` up to the next one bit, which must come before `end`.
 * @param {Uint8Array} stream
 * @param {number} at
 * @param {number} end
 */
function zeros(stream, at, end) {
  const start = at;
  let byte = stream[at >> 3] >> (at & 7);
  if (!byte) {
    at = (at | 7) + 1;
    while (at < end && !(byte = stream[at >> 3])) at += 8;
  }
  if (at < end) at += 31 - Math.clz32(byte & -byte);
  demand(at < end, "a section ends within a number");
  return at - start;
}

/**
 * Read a number of `width` bits (at most 40) at bit `at`.
 * @param {Uint8Array} stream
 * @param {number} at
 * @param {number} width
 * @returns {number}
 */
function number(stream, at, width) {
  if (width > 24) return number(stream, at, 24) + number(stream, at + 24, width - 24) * 2 ** 24;
  const i = at >> 3;
  const word = stream[i] | (stream[i + 1] << 8) | (stream[i + 2] << 16) | (stream[i + 3] << 24);
  return (word >>> (at & 7)) & ((1 << width) - 1);
}

/** The sections of a list, one after the other in a stream. `wait`: the items before a section's next event. */
class Sections {
  /**
   * @param {Uint8Array} stream
   * @param {Row[]} rows
   */
  constructor(stream, rows) {
    this.stream = stream;
    demand(stream.length < LARGEST_STREAM, "a stream is too large for this reader");
    let start = 0;
    this.all = rows.map(([events, k, flipped, bits]) => {
      const one = { k, flipped, events, remainder: start, quotient: start + events * k, end: start + bits, wait: 0 };
      start += bits;
      return one;
    });
    demand(start <= 8 * stream.length, "a section is longer than its stream");
    for (const one of this.all) this.#advance(one);
  }

  /** @param {typeof this.all[number]} one */
  #advance(one) {
    if (one.events-- <= 0) {
      one.wait = Infinity;
      return;
    }
    const count = zeros(this.stream, one.quotient, one.end);
    one.quotient += count + 1;
    one.wait = count * 2 ** one.k + number(this.stream, one.remainder, one.k);
    one.remainder += one.k;
  }

  /** Whether the next item of a section is marked. @param {number} at */
  next(at) {
    const one = this.all[at];
    if (one.wait-- > 0) return one.flipped;
    this.#advance(one);
    return !one.flipped;
  }

  /** Skip all items before the next event, and return their number. Only for a single section that is not flipped. */
  skip() {
    const one = this.all[0];
    const distance = one.wait;
    if (distance < Infinity) this.#advance(one);
    return distance;
  }

  /** Check, after the last item, that no event is left. */
  finish() {
    demand(this.all.every(({ events }) => events < 0), "an event is left after the last item");
  }
}

/**
 * The magnitudes of a group's large changes, by band.
 */
class Sizes {
  /**
   * @param {Uint8Array} stream
   * @param {[number, number][]} rows
   */
  constructor(stream, rows) {
    this.stream = stream;
    demand(stream.length < LARGEST_STREAM, "a stream is too large for this reader");
    let start = 0;
    this.all = rows.map(([k, bits]) => ({ k, at: start, end: (start += bits) }));
    demand(start <= 8 * stream.length, "a section is longer than its stream");
  }

  /** @param {number} band */
  next(band) {
    const one = this.all[band];
    const count = zeros(this.stream, one.at, one.end);
    const width = count + one.k;
    one.at += count + 1 + width;
    demand(width <= 15 && one.at <= one.end, "a change is larger than 32768");
    const size = number(this.stream, one.at - width, width) + 2 ** width - 2 ** one.k + 2;
    demand(size <= 32768, "a change is larger than 32768");
    return size;
  }

  finish() {
    demand(this.all.every(({ at, end }) => at === end), "a section of sizes has bits left");
  }
}

/**
 * The band of each exponent.
 * @param {number[]} limits
 */
function bandTable(limits) {
  return Uint8Array.from({ length: 256 }, (_, exponent) => limits.filter((limit) => limit <= exponent).length);
}

/**
 * The changes of a group of mode gaps, bands or mask.
 * @param {Group} group
 * @param {Changed[]} members
 * @param {Record<string, Uint8Array>} streams
 * @returns {Patch[]}
 */
function marked(group, members, streams) {
  const bands = bandTable(group.limits);
  const all = members.reduce((sum, { changes }) => sum + changes, 0);
  demand(streams.signs.length === Math.ceil(all / 8), "its signs are not those of its changes");
  const found = group.mode === "mask" ? masked(members, streams.mask) : gapped(group, bands, members, streams.gaps);
  const large = new Sections(streams.large, group.large);
  const sizes = new Sizes(streams.sizes, group.sizes);
  let change = 0;
  const patches = members.map(({ name, bits }, at) => {
    const places = found[at];
    const steps = new Uint16Array(places.length);
    for (let i = 0; i < places.length; i++, change++) {
      const band = bands[(bits[places[i]] >> 7) & 255];
      const size = large.next(band) ? sizes.next(band) : 1;
      steps[i] = (streams.signs[change >> 3] >> (change & 7)) & 1 ? -size : size;
    }
    return { name, places, steps };
  });
  large.finish();
  sizes.finish();
  return patches;
}

/** Collects the places of a tensor's changes, as many as the file says. */
class Places {
  /** @param {Changed} member */
  constructor({ name, changes }) {
    this.name = name;
    this.found = new Uint32Array(changes);
    this.count = 0;
  }

  /** @param {number} place */
  add(place) {
    this.found[this.count++] = place; // an index beyond the end stores nothing
  }

  done() {
    demand(this.count === this.found.length, `${quoted(this.name)} has ${this.count} changes, not ${this.found.length}`);
    return this.found;
  }
}

/**
 * @param {Group} group
 * @param {Uint8Array} bands
 * @param {Changed[]} members
 * @param {Uint8Array} stream
 */
function gapped(group, bands, members, stream) {
  const sections = new Sections(stream, group.gaps);
  const direct = group.mode === "gaps" && !group.gaps[0][2];
  let ahead = direct ? sections.skip() : 0; // place of the next change, from the start of the tensor
  const found = members.map((member) => {
    const places = new Places(member);
    const { bits } = member;
    if (direct) {
      for (; ahead < bits.length; ahead += 1 + sections.skip()) places.add(ahead);
      ahead -= bits.length;
    } else {
      for (let i = 0; i < bits.length; i++) if (sections.next(bands[(bits[i] >> 7) & 255])) places.add(i);
    }
    return places.done();
  });
  sections.finish();
  return found;
}

/**
 * @param {Changed[]} members
 * @param {Uint8Array} frame
 */
function masked(members, frame) {
  const all = members.reduce((sum, { bits }) => sum + bits.length, 0);
  const mask = unpacked(frame, Math.ceil(all / 8));
  let at = 0;
  return members.map((member) => {
    const places = new Places(member);
    for (let i = 0; i < member.bits.length; i++, at++) if ((mask[at >> 3] >> (at & 7)) & 1) places.add(i);
    return places.done();
  });
}

/**
 * The changes of a group that stores every word.
 * @param {"dense" | "raw"} mode
 * @param {Changed[]} members
 * @param {Record<string, Uint8Array>} streams
 * @returns {Patch[]}
 */
function planes(mode, members, streams) {
  const all = members.reduce((sum, { bits }) => sum + bits.length, 0);
  const [low, high] = [unpacked(streams.low, all), unpacked(streams.high, all)];
  let start = 0;
  return members.map((member) => {
    const { name, bits } = member;
    const places = new Places(member);
    const steps = new Uint16Array(bits.length);
    for (let i = 0; i < bits.length; i++) {
      const value = low[start + i] | (high[start + i] << 8);
      steps[i] = mode === "raw" ? value - bits[i] : (value >> 1) ^ -(value & 1);
      if (steps[i]) places.add(i);
    }
    start += bits.length;
    const found = places.done();
    return { name, places: found, steps: Uint16Array.from(found, (place) => steps[place]) };
  });
}
