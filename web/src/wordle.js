// Wordle, as env_space/game.py plays it, and a policy that plays it.

import { drawn, Policy, Tokenizer } from "./policy.js";
import { quoted, Refused } from "./refused.js";

export const LENGTH = 5;
export const MAX_GUESSES = 6;
export const CALL = '<tool_call>\n{"name": "guess", "arguments": {"word": "';
export const END = '"}}\n</tool_call>';
const GUESS_TOKENS = 7;
/** @typedef {{word: string, feedback: string, observation: string, message: string}} Move */

/**
 * Mark each letter: "+" in place, "?" elsewhere, "-" absent.
 * @param {string} guess
 * @param {string} secret
 */
export function feedback(guess, secret) {
  const left = [...secret].filter((letter, i) => guess[i] !== letter);
  return [...guess].map((letter, i) => {
    if (letter === secret[i]) return "+";
    const found = left.indexOf(letter);
    if (found >= 0) left.splice(found, 1);
    return found >= 0 ? "?" : "-";
  }).join("");
}

/** All words, and a choice among the words that no training used. */
export class Words {
  /** @param {string} answers @param {string} guesses as in env_space/words */
  constructor(answers, guesses) {
    this.answers = answers.split("\n").filter(Boolean);
    this.valid = new Set(guesses.split("\n").filter(Boolean));
  }

  /** A word that no training used. By sha256, the last tenth of the words; this method draws from the last sixteenth. */
  async secret() {
    for (;;) {
      const word = this.answers[crypto.getRandomValues(new Uint32Array(1))[0] % this.answers.length];
      const hash = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(word));
      if (new Uint8Array(hash)[0] >= 0xf0) return word;
    }
  }
}

/** Six guesses at one secret. */
export class Game {
  /** @param {string} secret @param {Words} words */
  constructor(secret, words) {
    this.secret = secret;
    this.words = words;
    /** @type {Move[]} */
    this.moves = [];
    this.gaveUp = false;
  }

  get solved() {
    return this.moves.at(-1)?.feedback === "+".repeat(LENGTH);
  }

  get over() {
    return this.solved || this.gaveUp || this.moves.length === MAX_GUESSES;
  }

  /** @param {string} word */
  guess(word) {
    const valid = this.words.valid.has(word);
    const marks = valid ? feedback(word, this.secret) : "";
    const text = valid ? [...word].map((letter, i) => `${letter}${i + 1}${marks[i]}`).join("") : "not a word";
    const move = { word, feedback: marks, observation: text, message: valid ? "" : `“${word}” is not in the word list.` };
    this.moves.push(move);
    if (this.over) move.observation += " game over";
    return move;
  }
}

/**
 * Random numbers that depend only on the word, so that two versions differ by their weights alone.
 * @param {string} word
 */
function chances(word) {
  let state = [...word].reduce((sum, letter) => Math.imul(sum, 31) + letter.charCodeAt(0), 7);
  return () => { // mulberry32
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** A policy at one game. It draws each token by its probability, as in training. */
export class Player {
  /**
   * @param {{model: import("./delta.js").Model, files: Map<string, Uint8Array>}} holder a replica, or a preview
   * @param {Game} game which may have begun
   */
  constructor({ model, files }, game) {
    this.chance = chances(game.secret);
    try {
      this.tokenizer = new Tokenizer(files);
      this.policy = new Policy(model, files);
    } catch (problem) {
      if (problem instanceof Refused) throw problem;
      throw new Refused(`this page cannot play: the run's tokenizer or configuration is not readable (${quoted(String(problem))})`);
    }
    this.unread = this.tokenizer.encode(`<|im_start|>user\nPlay Wordle.<|im_end|>\n<|im_start|>assistant\n`);
    for (const move of game.moves) {
      this.unread.push(...this.tokenizer.encode(CALL + move.word + END));
      this.read(move);
    }
  }

  /**
   * Write a guess, token by token; `between` may change the weights. Returns what the policy wrote.
   * @param {() => unknown} [between]
   */
  async write(between = () => {}) {
    const ids = [];
    while (ids.length < GUESS_TOKENS) {
      let logits = new Float32Array();
      this.unread.forEach((token, at, all) => (logits = this.policy.read(token, at === all.length - 1)));
      ids.push(drawn(logits, this.chance()));
      this.unread = [ids[ids.length - 1]];
      if (this.tokenizer.decode(this.unread) === END) break;
      await between();
    }
    return this.tokenizer.decode(ids);
  }

  /** Read the answer to a guess. @param {Move} move */
  read(move) {
    const text = `<|im_end|>\n<|im_start|>user\n<tool_response>\n${move.observation}\n</tool_response><|im_end|>\n<|im_start|>assistant\n`;
    this.unread.push(...this.tokenizer.encode(text));
  }
}

/** The word of a call that a policy wrote; null if it is no call. @param {string} text */
export function called(text) {
  const whole = text.startsWith(CALL) && text.endsWith(END);
  return whole ? text.slice(CALL.length, -END.length).toLowerCase() : null;
}
