// The boards, the keyboard, and the maps of the weights: what the page draws.

import { LENGTH, MAX_GUESSES } from "./wordle.js";

/** @typedef {import("./wordle.js").Move} Move */

const MARKS = /** @type {const} */ ({
  "+": { name: "place", says: "right place" },
  "?": { name: "other", says: "another place" },
  "-": { name: "none", says: "not in the word" },
});
/** @param {string} mark */
const markOf = (mark) => MARKS[/** @type {keyof typeof MARKS} */ (mark)];

/**
 * @param {string} tag
 * @param {Record<string, any>} [properties]
 * @param {(Node | string)[]} children
 */
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** @template {HTMLElement} [T=HTMLElement] @param {string} id */
export const byId = (id) => /** @type {T} */ (document.getElementById(id));

export class Board {
  /** @param {HTMLElement} list */
  constructor(list) {
    this.list = list;
    this.clear();
  }

  clear() {
    this.list.replaceChildren(...Array.from({ length: MAX_GUESSES }, (_, i) =>
      element("li", { ariaLabel: `Guess ${i + 1}: empty` },
        ...Array.from({ length: LENGTH }, () => element("span", { className: "tile", ariaHidden: "true" })))));
  }

  /** The letters of a guess that is being written. @param {number} at @param {string} text */
  type(at, text) {
    [...this.list.children[at].children].forEach((tile, place) => {
      tile.textContent = text[place] ?? "";
      tile.classList.toggle("typed", place < text.length);
    });
  }

  /** @param {number} at @param {Move} move @param {boolean} [letters] whether the letters are shown */
  show(at, move, letters = true) {
    const row = /** @type {HTMLElement} */ (this.list.children[at]);
    this.type(at, letters ? move.word.slice(0, LENGTH) : "");
    row.classList.toggle("invalid", !move.feedback);
    row.dataset.feedback = move.feedback || "invalid";
    [...move.feedback].forEach((mark, place) => row.children[place].classList.add(markOf(mark).name));
    row.ariaLabel = `Guess ${at + 1}: ${letters ? described(move) : "its letters are shown at the end"}`;
  }
}

/** A move in words. @param {Move} move */
export function described(move) {
  if (!move.feedback) return move.message;
  return [...move.feedback].map((mark, i) => `${move.word[i].toUpperCase()} ${markOf(mark).says}`).join(", ");
}

export class Keyboard {
  /** @param {HTMLElement} place @param {(key: string) => void} press */
  constructor(place, press) {
    this.place = place;
    place.append(...["qwertyuiop", "asdfghjkl", "↵zxcvbnm⌫"].map((row) => element("div", {}, ...[...row].map((key) => {
      const wide = "↵⌫".includes(key);
      const name = key === "↵" ? "Enter" : key;
      const button = element("button", { type: "button", textContent: name, className: wide ? "wide" : "" });
      button.dataset.key = key;
      button.ariaLabel = key === "⌫" ? "Delete letter" : name;
      button.addEventListener("pointerdown", (event) => event.preventDefault()); // so that the focus does not move
      button.addEventListener("click", () => press(key));
      return button;
    }))));
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const target = /** @type {HTMLElement} */ (event.target);
      if (target.closest("input:not([type=range]), summary") || (event.key === "Enter" && target.closest("a, button"))) return;
      const key = { Enter: "↵", Backspace: "⌫" }[event.key] ?? event.key.toLowerCase();
      if (!/^[a-z↵⌫]$/.test(key)) return;
      event.preventDefault();
      press(key);
    });
  }

  clear() {
    for (const key of this.place.querySelectorAll("button")) delete key.dataset.mark;
  }

  /** Each key shows the best mark that its letter has got. @param {Move} move */
  colour(move) {
    [...move.feedback].forEach((mark, i) => {
      const key = /** @type {HTMLElement} */ (this.place.querySelector(`[data-key="${move.word[i]}"]`));
      if (" -?+".indexOf(mark) <= " -?+".indexOf(key.dataset.mark ?? " ")) return;
      key.dataset.mark = mark;
      key.ariaLabel = `${move.word[i]}, ${markOf(mark).says}`;
    });
  }
}

const PER_CELL = 32; // weights
const COLUMNS = 96;

/** One map for each part of the model. A cell stands for 32 weights; the more of them changed, the brighter the cell. */
export class Maps {
  /** @param {HTMLElement} place @param {import("./delta.js").Model} model */
  constructor(place, model) {
    /** @type {Map<string, {map: string, start: number}>} */
    this.tensors = new Map();
    /** @type {Map<string, {size: number, canvas: HTMLCanvasElement, caption: HTMLElement}>} */
    this.maps = new Map();
    for (const [name, { bits }] of model) {
      const layer = /\.layers\.(\d+)\./.exec(name)?.[1];
      const map = layer ? `layer ${layer}` : name.replace(/^model\.|\.weight$/g, "").replaceAll("_", " ");
      const canvas = /** @type {HTMLCanvasElement} */ (element("canvas", { role: "img" }));
      const known = this.maps.get(map) ?? { size: 0, canvas, caption: element("figcaption") };
      this.tensors.set(name, { map, start: known.size });
      this.maps.set(map, { ...known, size: known.size + bits.length });
    }
    place.replaceChildren(...[...this.maps.values()].filter(({ size }) => size > 1000).map(({ canvas, caption }) =>
      element("figure", {}, canvas, caption)));
  }

  /** Light up the changes of a commit. @param {import("./replica.js").Move[]} moves */
  light(moves) {
    const style = getComputedStyle(document.documentElement);
    const heat = new Map([...this.maps].map(([name, { size }]) => [name, new Float32Array(Math.ceil(size / PER_CELL))]));
    const counts = new Map();
    for (const { patches } of moves) {
      for (const { name, places } of patches) {
        const { map, start } = /** @type {{map: string, start: number}} */ (this.tensors.get(name));
        const cells = /** @type {Float32Array} */ (heat.get(map));
        for (const place of places) cells[Math.floor((start + place) / PER_CELL)]++;
        counts.set(map, (counts.get(map) ?? 0) + places.length);
      }
    }
    const colour = style.getPropertyValue(moves.at(-1)?.forward === false ? "--undo" : "--delta");
    for (const [name, { size, canvas, caption }] of this.maps) {
      const cells = /** @type {Float32Array} */ (heat.get(name));
      canvas.width = COLUMNS;
      canvas.height = Math.ceil(cells.length / COLUMNS);
      const brush = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
      brush.fillStyle = colour;
      cells.forEach((changed, at) => {
        if (!changed) return;
        brush.globalAlpha = Math.min(1, 0.25 + changed / 4);
        brush.fillRect(at % COLUMNS, Math.floor(at / COLUMNS), 1, 1);
      });
      const changed = counts.get(name) ?? 0;
      caption.textContent = `${name}: ${changed.toLocaleString("en")} of ${size.toLocaleString("en")}`;
      canvas.ariaLabel = `${name}: ${changed} of ${size} weights changed`;
      canvas.classList.remove("lit");
      void canvas.offsetWidth; // so that the animation begins again
      canvas.classList.add("lit");
    }
  }
}
