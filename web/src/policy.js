// The policy of `make demo` in plain JavaScript: a Qwen3 of a million weights, computed as vLLM computes it on a CPU.

import { demand, quoted } from "./refused.js";

/** @typedef {import("./delta.js").Model} Model */

const decoder = new TextDecoder();
/** @param {Map<string, Uint8Array>} files @param {string} name */
function jsonFile(files, name) {
  const file = files.get(name);
  demand(file, `the anchor has no ${name}`);
  try {
    return JSON.parse(decoder.decode(file));
  } catch {
    demand(false, `${name} is not JSON`);
  }
}

/** Converts text to tokens and back. Between added tokens, each character is a token. */
export class Tokenizer {
  /** @param {Map<string, Uint8Array>} files of the anchor */
  constructor(files) {
    const { model, added_tokens: added } = jsonFile(files, "tokenizer.json");
    demand(model?.type === "BPE" && !model.merges?.length && Array.isArray(added),
      "this page cannot play: the run's tokenizer is not that of wordle-tiny");
    /** @type {Map<string, number>} */
    this.ids = new Map(added.map((/** @type {any} */ one) => [one.content, one.id]));
    const longestFirst = [...this.ids.keys()].sort((a, b) => b.length - a.length);
    this.pattern = new RegExp(longestFirst.map((text) => text.replace(/[^\w\s]/g, "\\$&")).join("|"), "g");
    for (const [letter, id] of Object.entries(model.vocab)) {
      if (!this.ids.has(letter)) this.ids.set(letter === "Ġ" ? " " : letter === "Ċ" ? "\n" : letter, Number(id));
    }
    this.texts = new Map([...this.ids].map(([text, id]) => [id, text]));
  }

  /** @param {string} text */
  encode(text) {
    const letters = (/** @type {string} */ part) => [...part].map((letter) => this.#id(letter));
    const ids = [];
    let end = 0;
    for (const match of text.matchAll(this.pattern)) {
      ids.push(...letters(text.slice(end, match.index)), this.#id(match[0]));
      end = match.index + match[0].length;
    }
    return [...ids, ...letters(text.slice(end))];
  }

  /** @param {string} text */
  #id(text) {
    const id = this.ids.get(text);
    demand(id !== undefined, `the tokenizer does not know ${quoted(text)}`);
    return id;
  }

  /** @param {number[]} ids */
  decode(ids) {
    return ids.map((id) => this.texts.get(id) ?? "").join("");
  }
}

// The value of each bf16 pattern. `bf16` rounds to the nearest such value, and ties to even.
const VALUE = new Float32Array(Uint32Array.from({ length: 65536 }, (_, bits) => bits << 16).buffer);
const ONE = new Float32Array(1);
const ITS_BITS = new Uint32Array(ONE.buffer);
/** @param {number} number */
function bf16(number) {
  ONE[0] = number;
  const bits = ITS_BITS[0];
  ITS_BITS[0] = (bits + 0x7fff + ((bits >>> 16) & 1)) & 0xffff0000;
  return ONE[0];
}

/**
 * `weight` [rows, columns] times `x`, rounded to bf16.
 * @param {Uint16Array} weight
 * @param {Float32Array} x
 */
function linear(weight, x) {
  const columns = x.length;
  const out = new Float32Array(weight.length / columns);
  for (let row = 0, at = 0; row < out.length; row++) {
    let sum = 0;
    for (let column = 0; column < columns; column++) sum += VALUE[weight[at++]] * x[column];
    out[row] = bf16(sum);
  }
  return out;
}

/**
 * @param {Float32Array} x not rounded
 * @param {Uint16Array} weight
 * @param {number} epsilon
 * @param {Float32Array} out
 */
function rmsNorm(x, weight, epsilon, out) {
  const size = weight.length;
  for (let start = 0; start < x.length; start += size) {
    let squares = 0;
    for (let i = start; i < start + size; i++) squares += x[i] * x[i];
    const scale = Math.fround(1 / Math.sqrt(squares / size + epsilon));
    for (let i = start; i < start + size; i++) out[i] = bf16(bf16(x[i] * scale) * VALUE[weight[i - start]]);
  }
  return out;
}

/** One conversation: its tokens' keys and values, each computed with the weights that were live then. */
export class Policy {
  /**
   * @param {Model} model
   * @param {Map<string, Uint8Array>} files of the anchor
   */
  constructor(model, files) {
    const config = jsonFile(files, "config.json");
    demand(config.architectures?.[0] === "Qwen3ForCausalLM" && !config.use_sliding_window && !config.attention_bias,
      `this page cannot play ${quoted(config.architectures?.[0])}, only Qwen3ForCausalLM`);
    this.model = model;
    this.config = config;
    this.heads = config.num_attention_heads;
    this.kvHeads = config.num_key_value_heads;
    this.size = config.head_dim;
    this.layers = config.num_hidden_layers;
    this.epsilon = config.rms_norm_eps;
    this.longest = config.max_position_embeddings;
    demand([this.heads, this.kvHeads, this.size, this.layers, this.longest].every((one) => one > 0 && one < 4096),
      "config.json has sizes that this page does not compute");
    const theta = config.rope_parameters?.rope_theta ?? config.rope_theta;
    const half = this.size / 2;
    this.angles = Float32Array.from({ length: half }, (_, i) => 1 / theta ** (i / half));
    const [query, key] = [this.heads * this.size, this.kvHeads * this.size];
    const { hidden_size: width, intermediate_size: inner, vocab_size: tokens } = config;
    /** @type {Record<string, number>} */
    const own = {
      "input_layernorm": width, "post_attention_layernorm": width, "self_attn.q_norm": this.size, "self_attn.k_norm": this.size,
      "self_attn.q_proj": query * width, "self_attn.k_proj": key * width, "self_attn.v_proj": key * width, "self_attn.o_proj": width * query,
      "mlp.gate_proj": inner * width, "mlp.up_proj": inner * width, "mlp.down_proj": width * inner,
    };
    const sizes = Object.entries({ "model.embed_tokens.weight": tokens * width, "model.norm.weight": width, [this.#head]: tokens * width });
    for (let layer = 0; layer < this.layers; layer++) {
      sizes.push(...Object.entries(own).map(([name, size]) => /** @type {[string, number]} */ ([`model.layers.${layer}.${name}.weight`, size])));
    }
    for (const [name, size] of sizes) demand(this.#weight(name).length === size, `${name} does not have the size that config.json says`);
    this.length = 0;
    /** @type {{keys: Float32Array[], values: Float32Array[]}[]} */
    this.cache = Array.from({ length: this.layers }, () => ({ keys: [], values: [] }));
  }

  get #head() {
    return this.config.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight";
  }

  /** @param {string} name */
  #weight(name) {
    const found = this.model.get(name);
    demand(found, `the checkpoint has no ${name}`);
    // The words of another dtype would be read as bf16, too, and give other numbers.
    demand(found.dtype === "BF16", `this page cannot play: ${name} is ${found.dtype}, and the page computes only with BF16`);
    return found.bits;
  }

  /**
   * Read a token. Returns the logits of the next token if `asked`.
   * @param {number} token
   * @param {boolean} [asked]
   */
  read(token, asked = true) {
    demand(this.length < this.longest, "the conversation is longer than the policy's context");
    const { epsilon } = this;
    const embedding = this.#weight("model.embed_tokens.weight");
    const width = this.#weight("model.norm.weight").length;
    let residual = Float32Array.from(embedding.subarray(token * width, (token + 1) * width), (bits) => VALUE[bits]);
    let normed = new Float32Array(width);
    // As in vLLM's fused kernel, the unrounded sum is normed, and the rounded sum is kept.
    const add = (/** @type {Float32Array} */ x, /** @type {string} */ name) => {
      const sum = residual.map((value, i) => value + x[i]);
      rmsNorm(sum, this.#weight(name), epsilon, normed);
      residual = sum.map(bf16);
    };
    rmsNorm(residual, this.#weight("model.layers.0.input_layernorm.weight"), epsilon, normed);
    for (let layer = 0; layer < this.layers; layer++) {
      const at = `model.layers.${layer}.`;
      add(this.#attention(layer, normed), `${at}post_attention_layernorm.weight`);
      const gate = linear(this.#weight(`${at}mlp.gate_proj.weight`), normed);
      const up = linear(this.#weight(`${at}mlp.up_proj.weight`), normed);
      const inner = gate.map((value, i) => bf16(bf16(value / (1 + Math.exp(-value))) * up[i]));
      const out = linear(this.#weight(`${at}mlp.down_proj.weight`), inner);
      add(out, layer + 1 < this.layers ? `model.layers.${layer + 1}.input_layernorm.weight` : "model.norm.weight");
    }
    this.length++;
    return asked ? linear(this.#weight(this.#head), normed) : new Float32Array();
  }

  /**
   * @param {number} layer
   * @param {Float32Array} x
   */
  #attention(layer, x) {
    const at = `model.layers.${layer}.self_attn.`;
    const { size, heads, kvHeads, epsilon } = this;
    const [query, key, value] = ["q", "k", "v"].map((name) => linear(this.#weight(`${at}${name}_proj.weight`), x));
    for (const [part, name] of /** @type {[Float32Array, string][]} */ ([[query, "q"], [key, "k"]])) {
      this.#rotate(rmsNorm(part, this.#weight(`${at}${name}_norm.weight`), epsilon, part));
    }
    const { keys, values } = this.cache[layer];
    keys.push(key);
    values.push(value);
    const out = new Float32Array(heads * size);
    const scale = 1 / Math.sqrt(size);
    for (let head = 0; head < heads; head++) {
      const own = head * size;
      const shared = Math.floor((head * kvHeads) / heads) * size;
      const scores = keys.map((one) => {
        let sum = 0;
        for (let i = 0; i < size; i++) sum += query[own + i] * one[shared + i];
        return sum * scale;
      });
      const most = Math.max(...scores);
      const shares = scores.map((score) => Math.exp(score - most));
      const all = shares.reduce((sum, share) => sum + share, 0);
      for (let i = 0; i < size; i++) {
        out[own + i] = bf16(shares.reduce((sum, share, j) => sum + share * values[j][shared + i], 0) / all);
      }
    }
    return linear(this.#weight(`${at}o_proj.weight`), out);
  }

  /** @param {Float32Array} x heads of query or key */
  #rotate(x) {
    const half = this.size / 2;
    for (let i = 0; i < half; i++) {
      const cos = bf16(Math.cos(Math.fround(this.length * this.angles[i])));
      const sin = bf16(Math.sin(Math.fround(this.length * this.angles[i])));
      for (let a = i, b = i + half; b < x.length; a += this.size, b += this.size) {
        [x[a], x[b]] = [bf16(x[a] * cos - x[b] * sin), bf16(x[b] * cos + x[a] * sin)];
      }
    }
  }
}

/** The likeliest token; of equally likely tokens, the first. @param {Float32Array} logits */
export function greedy(logits) {
  let best = 0;
  for (let i = 1; i < logits.length; i++) if (logits[i] > logits[best]) best = i;
  return best;
}

/**
 * A token drawn by its probability, at temperature 1.
 * @param {Float32Array} logits
 * @param {number} chance from 0 to 1
 */
export function drawn(logits, chance) {
  const most = logits.reduce((a, b) => Math.max(a, b));
  const weights = logits.map((logit) => Math.exp(logit - most));
  let left = chance * weights.reduce((sum, weight) => sum + weight, 0);
  const found = weights.findIndex((weight) => (left -= weight) < 0);
  return found < 0 ? greedy(logits) : found;
}
