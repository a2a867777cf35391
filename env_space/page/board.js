// What both tabs show of a game: the grid of guesses, the parts of the reward and the log.

export const MARKS = {
  "+": { name: "place", says: "right place" },
  "?": { name: "other", says: "another place" },
  "-": { name: "none", says: "not in the word" },
};
const PARTS = {
  solved: "Solved",
  greens: "Right place",
  yellows: "Another place",
  repetition: "Repeated",
  invalid: "Not a word",
  gave_up: "Gave up",
};
const FLIP_MS = matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : 180;

export const pause = (ms) => new Promise((done) => setTimeout(done, ms));

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export class Board {
  constructor(panel) {
    this.list = panel.querySelector(".board");
    this.rewards = panel.querySelector(".reward");
    this.log = panel.querySelector(".log");
    this.draw(6, 5);
  }

  // Empty rows of empty tiles.
  draw(rows, length) {
    this.length = length;
    this.list.classList.remove("won");
    this.list.style.setProperty("--length", length);
    this.list.style.setProperty("--rows", rows);
    const tile = () => element("span", { className: "tile", ariaHidden: "true" });
    const row = (_, i) => element("li", { ariaLabel: `Guess ${i + 1}: empty` }, ...Array.from({ length }, tile));
    this.rows = Array.from({ length: rows }, row);
    this.list.replaceChildren(...this.rows);
    this.log.replaceChildren();
    this.reward();
  }

  // The letters of a guess that is being typed.
  type(i, text) {
    [...this.rows[i].children].forEach((tile, place) => {
      tile.textContent = text[place] ?? "";
      tile.classList.toggle("typed", place < text.length);
    });
  }

  // Turn the tiles of a played move over, one after the other.
  async show(move) {
    const row = this.rows[move.turn - 1];
    row.ariaLabel = `Guess ${move.turn}: ${describe(move)}`;
    this.type(move.turn - 1, move.word.slice(0, this.length));
    row.classList.toggle("invalid", !move.valid);
    for (const [place, mark] of [...move.feedback].entries()) {
      row.children[place].classList.add("turned");
      await pause(FLIP_MS);
      row.children[place].classList.add(MARKS[mark].name);
    }
    row.dataset.feedback = move.feedback || "invalid";
    if (move.solved) this.list.classList.add("won");
    this.reward(move.reward_parts, move.reward);
  }

  // The parts of the reward and their sum; nothing yet without any.
  reward(parts = {}, total = 0) {
    const lines = Object.entries(PARTS).map(([part, name]) => line(name, parts[part] ?? 0));
    this.rewards.replaceChildren(...lines, line("Sum", total));
    this.rewards.lastElementChild.className = "sum";
  }

  note(...content) {
    this.log.append(element("li", {}, ...content));
    this.log.scrollTop = this.log.scrollHeight;
  }
}

function line(name, value) {
  const text = value ? value.toFixed(2).replace("-", "−") : "0";
  const shown = element("dd", { textContent: value > 0 ? `+${text}` : text });
  shown.className = value > 0 ? "gain" : value < 0 ? "loss" : "";
  return element("div", {}, element("dt", { textContent: name }), shown);
}

// A move in words, for the message line and for screen readers.
export function describe(move) {
  if (!move.valid) return move.message;
  const letters = [...move.feedback].map((mark, i) => `${move.word[i].toUpperCase()} ${MARKS[mark].says}`);
  return letters.join(", ");
}
