// One more replica of a run: it finds the newest version, builds it, proves its digest, and goes to any other version.

import { apply, decode, undo } from "./delta.js";
import { stateDigest } from "./digest.js";
import { completed, FIRST, REST, sketched, weightsOf } from "./preview.js";
import { check, checkTogether, LARGEST_RECORD, nameOf, newer, parse, PublicKeys, recipe, sizeOf } from "./records.js";
import { demand, Refused } from "./refused.js";

/** @typedef {import("./records.js").Manifest} Manifest */
/** @typedef {import("./records.js").FileRef} FileRef */
/** @typedef {import("./records.js").DeltaRef} DeltaRef */
/** @typedef {import("./store.js").Bucket} Bucket */
/** @typedef {import("./delta.js").Model} Model */
/** @typedef {import("./delta.js").Patch} Patch */
/** @typedef {import("./delta.js").Delta} Delta */
/** @typedef {{patches: Patch[], forward: boolean}} Move */
/** @typedef {{from: number | null, version: number, digest: string, moves: Move[], bytes: number, ms: number}} Commit */

/** @typedef {import("./preview.js").Preview} Preview */

const LARGEST_JOIN = 2 ** 30; // bytes of all files that lead to a version
const KEPT_DELTAS = 64 << 20; // bytes of decoded deltas, which lead back from the live version and forward again
const KEPT_MANIFESTS = 16 << 20; // bytes
const SAFETY = 60; // seconds between two looks at a bucket that reports its changes, in case a report is lost

/** The runs of a bucket. @param {Bucket} bucket */
export async function runsOf(bucket) {
  const names = (await bucket.list("runs/")).map((key) => key.split("/")[1]);
  return [...new Set(names)].sort();
}

export class Replica {
  /**
   * @param {Bucket} bucket
   * @param {string} run
   * @param {PublicKeys} [keys]
   */
  constructor(bucket, run, keys = new PublicKeys()) {
    this.bucket = bucket;
    this.run = run;
    this.keys = keys;
    this.folder = `runs/${run}/`;
    /** The live weights: they change only within `#commit`. @type {Model} */
    this.model = new Map();
    /** The small files of the anchor: configuration and tokenizer. @type {Map<string, Uint8Array>} */
    this.files = new Map();
    /** @type {Manifest | null} the manifest of the live version */
    this.manifest = null;
    /** @type {Manifest | null} */
    this.newest = null;
    /** The key that signed the newest version; "" if the page trusts no key. */
    this.signer = "";
    /** The steps that led to the live version, oldest first, each with its parts. @type {DeltaRef[][]} */
    this.past = [];
    /** Decoded deltas by key. @type {Recent<string, Delta>} */
    this.known = new Recent(KEPT_DELTAS, memoryOf);
    /** Manifests by version. @type {Recent<number, Manifest>} */
    this.manifests = new Recent(KEPT_MANIFESTS, (manifest) => JSON.stringify(manifest).length);
    /** Called after a commit. @type {(commit: Commit) => void} */
    this.onCommit = () => {};
    /**
     * Called during a join if the bucket has a preview of the anchor, with the preview, its version, and the number of
     * bytes that are still to come.
     * @type {(preview: Preview, version: number, bytes: number) => void}
     */
    this.onPreview = () => {};
    /** @type {Promise<unknown>} */
    this.busy = Promise.resolve();
  }

  /** Look for a newer version. Returns its manifest, or null. */
  async look() {
    const found = await this.#find();
    if (!found || (this.newest && !newer(found, this.newest))) return null;
    if (this.newest && found.born !== this.newest.born) this.#forget();
    this.newest = found;
    this.manifests.set(found.version, found);
    return found;
  }

  /** @returns {Promise<Manifest | null>} */
  async #find() {
    const heads = (await this.bucket.list(`${this.folder}heads/`)).filter((key) => key.endsWith(".json")).sort();
    try {
      const key = heads.at(-1);
      demand(key, `run ${this.run} has no HEAD`);
      const head = await parse("Head", await this.bucket.get(key, LARGEST_RECORD), key);
      this.signer = await this.keys.check(head, key);
      demand(head.run === this.run, `${key} is of another run`);
      if (!head.manifest) return null;
      return await this.#record(head.manifest);
    } catch (problem) {
      const other = await this.#withoutHead();
      if (!other) throw problem;
      return other;
    }
  }

  /** The newest version, found from the manifests alone: the version of the writer with the highest term. */
  async #withoutHead() {
    const names = (await this.#manifestKeys()).sort(byWriterThenVersion);
    for (const { key } of names.slice(-3).reverse()) {
      try {
        return await this.#parsed(await this.bucket.get(key, LARGEST_RECORD), key);
      } catch (problem) {
        if (!(problem instanceof Refused)) throw problem;
      }
    }
    return null;
  }

  async #manifestKeys() {
    const keys = await this.bucket.list(`${this.folder}manifests/`);
    return keys.flatMap((key) => {
      const [, version, term, id] = /\/(\d{8,15})\.t(\d{1,15})-([0-9a-f]{8})\.json$/.exec(key) ?? [];
      return version ? [{ key, version: Number(version), term: Number(term), id }] : [];
    });
  }

  /** The versions that the run still has, oldest first. */
  async versions() {
    return [...new Set((await this.#manifestKeys()).map(({ version }) => version))].sort((a, b) => a - b);
  }

  /** @param {FileRef} ref */
  async #record(ref) {
    demand(ref.size <= LARGEST_RECORD, `${ref.key} is too large for a manifest`);
    const data = await this.bucket.get(ref.key, ref.size);
    await check(ref, data);
    return this.#parsed(data, ref.key);
  }

  /** @param {Uint8Array} data @param {string} key */
  async #parsed(data, key) {
    const manifest = await parse("Manifest", data, key);
    demand(manifest.run === this.run, `${key} is of another run`);
    await this.keys.check(manifest, key);
    return manifest;
  }

  /** The manifest of an earlier version. @param {number} version */
  async #manifestOf(version) {
    const known = this.manifests.get(version);
    if (known) return known;
    const child = this.manifests.get(version + 1)?.parent;
    if (child) return this.#keep(await this.#record(child));
    const names = (await this.#manifestKeys()).filter((one) => one.version === version).sort(byWriterThenVersion);
    const name = names.at(-1);
    demand(name, `the run no longer has version ${version}`);
    const manifest = await this.#parsed(await this.bucket.get(name.key, LARGEST_RECORD), name.key);
    demand(manifest.version === version, `${name.key} is of version ${manifest.version}`);
    return this.#keep(manifest);
  }

  /** @param {Manifest} manifest */
  #keep(manifest) {
    demand(manifest.born === this.newest?.born, "the run was started again");
    this.manifests.set(manifest.version, manifest);
    return manifest;
  }

  /** Forget the old run: the run was started again. */
  #forget() {
    this.manifests.clear();
    this.known.clear();
    this.past = [];
    this.manifest = null;
  }

  /**
   * Make a version live: undo deltas, or apply them, or begin at an anchor. If anything is refused, nothing changes.
   * @param {number} version
   * @returns {Promise<Commit | null>} null if it is live already
   */
  goTo(version) {
    return this.#inTurn(() => this.#goTo(version));
  }

  /** Do some work after all earlier work. @template T @param {() => Promise<T>} work */
  #inTurn(work) {
    const turn = this.busy.then(work);
    this.busy = turn.then(() => {}, () => {}); // without the result, which may be as large as the model
    return turn;
  }

  /** @param {number} version */
  async #goTo(version) {
    if (this.manifest?.version === version) return null;
    const started = performance.now();
    const { target, from, past, moves, model, files, digest, bytes } = await this.#staged(version);
    if (from === null) {
      this.model.clear(); // the table stays the same object, because players hold it
      for (const [name, tensor] of model) this.model.set(name, tensor);
      this.files = files;
    } else {
      for (const { patches, forward } of moves) (forward ? apply : undo)(this.model, patches);
    }
    this.manifest = target;
    this.past = past;
    const commit = { from, version, digest, moves, bytes, ms: performance.now() - started };
    this.onCommit(commit);
    return commit;
  }

  /**
   * Build a version next to the live weights, and prove its digest.
   * @param {number} version
   */
  async #staged(version) {
    const target = await this.#manifestOf(version);
    // Only the steps after the last one that `known` has dropped lead back.
    const past = this.past.slice(this.past.findLastIndex((parts) => !parts.every(({ key }) => this.known.has(key))) + 1);
    /** @type {Move[]} */
    const moves = [];
    let at = this.manifest?.version ?? null;
    while (at !== null && at > version) {
      const parts = past.pop();
      if (parts) moves.push({ patches: parts.flatMap(({ key }) => this.known.get(key)?.patches ?? []), forward: false });
      at = parts ? parts[0].base : null; // null: begin again at an anchor
    }
    let way = at === null ? null : recipe(target, at);
    const from = way ? this.manifest?.version ?? null : null;
    way ??= recipe(target, null);
    demand(way, `nothing leads to version ${version}`);
    const held = new Map(way.deltas.map(({ key }) => [key, this.known.get(key)])); // `known` may drop them meanwhile
    // Parts have one hash together, so all parts of a delta are fetched, or none.
    const lacking = new Set(way.deltas.filter(({ key }) => !held.get(key)).map(stepOf));
    for (const ref of way.deltas) if (lacking.has(stepOf(ref))) held.delete(ref.key);
    const fresh = [...(way.anchor?.files ?? []), ...way.deltas].filter(({ key }) => !held.get(key));
    demand(sizeOf(fresh) <= LARGEST_JOIN, `version ${version} is too large for a tab`);
    /** @type {Map<string, Promise<Uint8Array>>} */
    let coming;
    let model = this.model;
    let { files } = this;
    let bytes = sizeOf(fresh);
    if (way.anchor) {
      past.length = moves.length = 0;
      ({ model, files, coming, bytes } = await this.#joined(way.anchor, fresh));
    } else {
      model = copied(model);
      coming = this.#fetchAll(fresh);
    }
    for (const move of moves) undo(model, move.patches);
    for (const ref of way.deltas) {
      let delta = held.get(ref.key);
      if (!delta) {
        const file = /** @type {Uint8Array} */ (await coming.get(ref.key));
        delta = await named(ref.key, () => decode(file, model));
        demand(delta.base === ref.base && delta.version === ref.version, `${ref.key} is of other versions`);
        this.known.set(ref.key, delta);
      }
      apply(model, delta.patches);
      const step = past.at(-1);
      const move = moves.at(-1);
      if (move && step?.[0].version === ref.version) { // another part of the same step
        step.push(ref);
        move.patches = [...move.patches, ...delta.patches];
      } else {
        past.push([ref]);
        moves.push({ patches: delta.patches, forward: true });
      }
    }
    const digest = await stateDigest(patterns(model));
    demand(digest === target.digest,
      `version ${version} was not taken: the weights have the digest ${digest}, its manifest says ${target.digest}`);
    return { target, from, past, moves, model, files, digest, bytes };
  }

  /**
   * Build and prove a version's weights, next to the live weights.
   * @param {number} version
   */
  at(version) {
    return this.#inTurn(async () => {
      const { model, files } = await this.#staged(version);
      return { model, files };
    });
  }

  /** The digest of the live weights. */
  digest() {
    return stateDigest(patterns(this.model));
  }

  /**
   * Fetch files side by side; each file is verified before it is given out.
   * @param {FileRef[]} refs
   */
  #fetchAll(refs) {
    /** The files that have one hash together. @type {Map<string, FileRef[]>} */
    const groups = new Map();
    for (const ref of refs) {
      const group = stepOf(ref) ?? ref.key;
      groups.set(group, [...(groups.get(group) ?? []), ref]);
    }
    /** @type {Map<string, Promise<Uint8Array>>} */
    const files = new Map();
    for (const parts of groups.values()) {
      const together = this.#proven(parts);
      together.catch(() => {}); // the code that awaits a file sees the problem
      parts.forEach(({ key }, i) => {
        const file = together.then((found) => found[i]);
        file.catch(() => {});
        files.set(key, file);
      });
    }
    return files;
  }

  /** One file, or all parts of a delta. @param {FileRef[]} refs */
  async #proven(refs) {
    const found = await Promise.all(refs.map((ref) => this.bucket.get(ref.key, ref.size)));
    if (refs.length === 1) await check(refs[0], found[0]);
    else await checkTogether(/** @type {DeltaRef[]} */ (refs), found);
    return found;
  }

  /**
   * The anchor's weights and small files. A single file of weights may come as two, see preview.js.
   * @param {import("./records.js").Anchor} anchor
   * @param {FileRef[]} refs what a join fetches
   */
  async #joined(anchor, refs) {
    const shards = anchor.files.filter((ref) => nameOf(ref).endsWith(".safetensors"));
    demand(shards.length, "the anchor has no weights");
    const [whole] = shards; // if there are several, none has a preview
    const files = new Map();
    const folder = whole.key.slice(0, -nameOf(whole).length);
    const listed = shards.length > 1 ? [] : await this.bucket.list(folder).catch(() => /** @type {string[]} */ ([]));
    /** @type {Promise<Uint8Array> | undefined} */
    let weights;
    let bytes = sizeOf(refs);
    if ([FIRST, REST].every((name) => listed.includes(folder + name))) {
      try {
        const limit = whole.size + LARGEST_RECORD;
        const first = await this.bucket.get(folder + FIRST, limit);
        const preview = await named(folder + FIRST, () => sketched(first, whole.size));
        for (const ref of anchor.files) {
          const file = preview.files.get(nameOf(ref));
          if (file && (await check(ref, file).then(() => true, () => false))) files.set(nameOf(ref), file);
        }
        refs = refs.filter((ref) => !files.has(nameOf(ref)));
        const left = sizeOf(refs) - whole.size + Math.ceil(0.75 * preview.bits.length);
        bytes = first.length + left;
        this.onPreview(preview, anchor.version, left);
        weights = named(folder + REST, async () => completed(preview, await this.bucket.get(folder + REST, limit)));
        weights = weights.then(async (file) => {
          await check(whole, file);
          return file;
        });
        if (listed.includes(whole.key)) {
          weights = weights.catch((problem) => (problem instanceof Refused ? this.#proven([whole]).then(([file]) => file) : Promise.reject(problem)));
        }
        weights.catch(() => {}); // the code that awaits the file sees the problem
      } catch (problem) {
        if (!(problem instanceof Refused) || !listed.includes(whole.key)) throw problem;
      }
    }
    const coming = this.#fetchAll(refs.filter((ref) => !weights || ref !== whole));
    for (const ref of anchor.files) if (!shards.includes(ref) && !files.has(nameOf(ref))) files.set(nameOf(ref), await coming.get(ref.key));
    /** @type {Model} */
    const model = new Map();
    for (const shard of shards) {
      const file = /** @type {Uint8Array} */ (await (weights ?? coming.get(shard.key)));
      for (const [name, tensor] of await named(nameOf(shard), async () => weightsOf(file))) model.set(name, tensor);
    }
    return { model, files, coming, bytes };
  }

  /**
   * Follow the run: go to each newest version while `wanted()` says so, until `signal` ends it.
   * @param {AbortSignal} signal
   * @param {{wanted?: () => boolean, onProblem?: (sentence: string) => void}} [options]
   */
  async follow(signal, { wanted = () => true, onProblem = () => {} } = {}) {
    let changed = true; // whether the bucket changed since the last look began
    let live = false; // whether the bucket reports its changes
    let wake = () => {};
    this.#listen(signal, (reports, news) => {
      live = reports;
      changed ||= news;
      if (news) wake();
    });
    while (!signal.aborted) {
      const reported = changed;
      changed = false;
      try {
        const found = await this.look();
        if (found && !reported) live = false; // a report was lost
        if (this.newest && wanted()) await this.goTo(this.newest.version);
        onProblem("");
      } catch (problem) {
        if (!(problem instanceof Refused)) throw problem;
        onProblem(problem.message);
      }
      if (changed) continue;
      // A bucket may report a write a moment before it shows the write, so look once more soon.
      const pause = paused(live && !reported ? Math.max(SAFETY, this.bucket.pollSeconds) : this.bucket.pollSeconds, signal);
      wake = pause.wake;
      await pause.done;
    }
  }

  /**
   * Follow the bucket's feed, if it has one, with growing pauses between two connections.
   * @param {AbortSignal} signal
   * @param {(reports: boolean, news: boolean) => void} report
   */
  async #listen(signal, report) {
    for (let pause = 5; this.bucket.feed && !signal.aborted; pause = Math.min(2 * pause, 320)) {
      const began = Date.now();
      await this.bucket.feed((key) => report(true, !key || key.startsWith(`${this.folder}heads/`)), signal).catch(() => {});
      report(false, false);
      if (Date.now() - began > 60_000) pause = 1;
      await paused(pause * (0.5 + Math.random() / 2), signal).done; // random, because many pages lose their feeds at the same moment
    }
  }
}

/**
 * A map whose values take at most `budget` bytes: it drops those that were not used for the longest time.
 * @template Key, Value
 * @extends {Map<Key, Value>}
 */
class Recent extends Map {
  bytes = 0;

  /** @param {number} budget @param {(value: Value) => number} sizeOf */
  constructor(budget, sizeOf) {
    super();
    this.budget = budget;
    this.sizeOf = sizeOf;
  }

  /** @param {Key} key */
  get(key) {
    const value = super.get(key);
    if (value !== undefined) {
      super.delete(key);
      super.set(key, value); // at the end, because a map keeps the order of insertion
    }
    return value;
  }

  /** @param {Key} key @param {Value} value */
  set(key, value) {
    this.delete(key);
    this.bytes += this.sizeOf(value);
    super.set(key, value);
    while (this.bytes > this.budget) this.delete(/** @type {Key} */ (this.keys().next().value));
    return this;
  }

  /** @param {Key} key */
  delete(key) {
    const value = super.get(key);
    if (value !== undefined) this.bytes -= this.sizeOf(value);
    return super.delete(key);
  }

  clear() {
    super.clear();
    this.bytes = 0;
  }
}

const OBJECTS = 512; // bytes of the objects of a patch, besides its numbers

/** The memory of a decoded delta. @param {Delta} delta */
const memoryOf = ({ patches }) =>
  patches.reduce((sum, { places, steps }) => sum + places.byteLength + steps.byteLength + OBJECTS, OBJECTS);

/** A pause that `wake` or the signal ends. @param {number} seconds @param {AbortSignal} signal */
function paused(seconds, signal) {
  let wake = () => {};
  const done = new Promise((resolve) => (wake = () => resolve(null)));
  const timer = setTimeout(wake, 1000 * seconds);
  signal.addEventListener("abort", wake);
  done.then(() => {
    clearTimeout(timer);
    signal.removeEventListener("abort", wake);
  });
  return { done, wake };
}

/** Names the delta or jump that a file belongs to. @param {FileRef | DeltaRef} ref */
const stepOf = (ref) => ("base" in ref ? `${ref.base}-${ref.version}` : undefined);

/** @param {{term: number, id: string, version: number}} a @param {{term: number, id: string, version: number}} b */
const byWriterThenVersion = (a, b) => a.term - b.term || a.id.localeCompare(b.id) || a.version - b.version;

/** @param {Model} model @returns {Model} */
const copied = (model) => new Map([...model].map(([name, tensor]) => [name, { ...tensor, bits: tensor.bits.slice() }]));

/** @param {Model} model @returns {Iterable<[string, Uint16Array]>} */
const patterns = (model) => [...model].map(([name, { bits }]) => [name, bits]);

/**
 * Name the object in a refusal.
 * @template T
 * @param {string} key
 * @param {() => Promise<T>} work
 */
async function named(key, work) {
  try {
    return await work();
  } catch (problem) {
    throw problem instanceof Refused ? new Refused(`${key} was refused: ${problem.message}`) : problem;
  }
}
