// Lets a person play on the engine that trains a policy. Each move is one request.

import { Board, MARKS, describe, element, pause } from "./board.js";

const ROWS = ["qwertyuiop", "asdfghjkl", "↵zxcvbnm⌫"];
const NAMES = { "↵": "Enter", "⌫": "Delete letter" };
const PRAISE = ["On the first guess!", "On the second guess!", "In three.", "In four.", "In five.", "On the last guess!"];

const panel = document.querySelector("#play");
const board = new Board(panel);
const says = panel.querySelector(".says");
const keys = panel.querySelector(".keys");
const seedLink = panel.querySelector(".seed");
let game = { over: true };
let starts = 0; // games that were asked for

async function ask(method, path, body) {
  const answer = await fetch(path, {
    method,
    headers: { "Content-Type": "application/json" },
    body: body && JSON.stringify(body),
  });
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.detail);
  return content;
}

const randomSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];
const seedInAddress = () => Number(/^#seed=(\d{1,15})$/.exec(location.hash)?.[1] ?? NaN);

async function start(seed) {
  const asked = (starts += 1);
  while (game.showing) await pause(50); // a move that is being shown belongs to this game, not to the next
  if (asked !== starts) return; // meanwhile, another game was asked for
  if (!game.over) ask("DELETE", `play/${game.session}`).catch(() => {});
  game = { over: true };
  try {
    const opened = await ask("POST", "play", { seed });
    game = { ...opened, turn: 1, typed: "", over: false, busy: false };
    board.draw(opened.max_guesses, opened.length);
    keys.querySelectorAll("button").forEach((key) => key.removeAttribute("data-mark"));
    const title = "A link to the same word, for somebody else";
    Object.assign(seedLink, { textContent: `#${seed}`, href: `#seed=${seed}`, title });
    says.textContent = `Guess a word of ${opened.length} letters.${opened.hard_mode ? " Use every hint." : ""}`;
  } catch (problem) {
    says.textContent = problem.message;
  }
}

async function submit() {
  if (game.typed.length < game.length) {
    says.textContent = `A guess has ${game.length} letters.`;
    return;
  }
  const mine = game;
  mine.busy = true;
  try {
    const move = await ask("POST", `play/${game.session}/guess`, { word: game.typed, turn: game.turn });
    if (mine === game) await show(move);
  } catch (problem) {
    if (mine !== game) return; // another game was begun
    const lost = problem instanceof TypeError;
    says.textContent = lost ? "The server did not answer. Press Enter to send the guess again." : problem.message;
  }
  mine.busy = false;
}

async function show(move) {
  game.showing = true;
  board.note(element("code", { textContent: move.observation }));
  await board.show(move);
  [...move.feedback].forEach((mark, i) => colour(move.word[i], mark));
  game.over = move.done;
  game.turn += 1;
  game.typed = "";
  game.showing = false;
  const aloud = element("span", { className: "aloud", textContent: `${describe(move)}. ` });
  says.replaceChildren(element("span", {}, aloud, move.done ? result(move) : advice(move)));
}

function advice(move) {
  const left = game.max_guesses - move.turn;
  return `${move.message} ${left} ${left === 1 ? "guess" : "guesses"} left.`;
}

function result(move) {
  if (move.solved) return `${PRAISE[move.turn - 1]} The word is ${move.secret.toUpperCase()}.`;
  return `Not this time. The word was ${move.secret.toUpperCase()}.`;
}

// A key keeps the best that is known of its letter.
function colour(letter, mark) {
  const key = keys.querySelector(`[data-key="${letter}"]`);
  const rank = " -?+";
  if (rank.indexOf(mark) <= rank.indexOf(key.dataset.mark ?? " ")) return;
  key.dataset.mark = mark;
  key.ariaLabel = `${letter}, ${MARKS[mark].says}`;
}

function press(key) {
  if (game.over || game.busy) return;
  if (key === "↵") submit();
  else if (key === "⌫") game.typed = game.typed.slice(0, -1);
  else if (game.typed.length < game.length) game.typed += key;
  if (key !== "↵") board.type(game.turn - 1, game.typed);
}

function keyButton(key) {
  const button = element("button", { type: "button", textContent: key === "↵" ? "Enter" : key });
  button.dataset.key = key;
  button.ariaLabel = NAMES[key] ?? key;
  button.addEventListener("pointerdown", (event) => event.preventDefault()); // the focus stays where it is
  button.addEventListener("click", () => press(key));
  return button;
}

document.addEventListener("keydown", (event) => {
  if (panel.hidden || event.ctrlKey || event.metaKey || event.altKey) return;
  const key = { Enter: "↵", Backspace: "⌫" }[event.key] ?? event.key.toLowerCase();
  const onControl = event.target.closest("a, button") && event.key === "Enter";
  if (onControl || !/^[a-z↵⌫]$/.test(key)) return;
  event.preventDefault();
  press(key);
});

panel.querySelector(".new").addEventListener("click", () => {
  history.replaceState(null, "", location.pathname);
  start(randomSeed());
  board.list.focus({ preventScroll: true });
});
addEventListener("hashchange", () => Number.isNaN(seedInAddress()) || start(seedInAddress()));
addEventListener("pagehide", () => game.over || fetch(`play/${game.session}`, { method: "DELETE", keepalive: true }));

keys.append(...ROWS.map((row) => element("div", {}, ...[...row].map(keyButton))));
start(Number.isNaN(seedInAddress()) ? randomSeed() : seedInAddress());
