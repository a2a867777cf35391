// Shows a game of a replica's policy: the server streams its events.

import { Board, describe, element, pause } from "./board.js";

const panel = document.querySelector("#watch");
const board = new Board(panel);
const says = panel.querySelector(".says");
const button = panel.querySelector(".new");
const hint = panel.querySelector(".hint");
const THINK_MS = 500; // a small policy answers faster than one can read

// The events of a server-sent stream, as {kind, data}.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    text += part.value;
    const whole = text.split("\n\n");
    text = whole.pop();
    for (const event of whole) {
      const [, kind, data] = /^event: (\w+)\ndata: (.*)$/s.exec(event);
      yield { kind, data: JSON.parse(data) };
    }
  }
}

const SHOW = {
  opened(game) {
    board.draw(game.max_guesses, game.length);
    const link = { textContent: `#${game.seed}`, href: `#seed=${game.seed}`, title: "Play the same word yourself" };
    Object.assign(panel.querySelector(".seed"), link);
    says.textContent = "The policy is thinking…";
  },
  async turn({ text, version, move }) {
    hint.textContent = version ? `Weights of version ${version}.` : "";
    board.note(element("code", { textContent: text || "(nothing)" }));
    if (!move) return;
    await board.show(move);
    const aloud = element("span", { className: "aloud", textContent: `${move.word}: ${describe(move)}. ` });
    says.replaceChildren(element("span", {}, aloud, move.message || "The policy is thinking…"));
    await pause(THINK_MS);
  },
  ended({ solved, secret }) {
    const how = solved ? "The policy found the word" : "The policy did not find the word";
    says.textContent = `${how}: ${secret.toUpperCase()}.`;
  },
  problem({ detail }) {
    throw new Error(detail);
  },
};

async function watch() {
  if (button.disabled) return;
  button.disabled = true;
  says.textContent = "Asking the replica…";
  try {
    const answer = await fetch("watch");
    if (!answer.ok) throw new Error((await answer.json()).detail);
    for await (const { kind, data } of events(answer.body)) await SHOW[kind](data);
    button.textContent = "Watch another";
  } catch (problem) {
    button.textContent = "Try again";
    says.textContent = problem instanceof TypeError ? "The server did not answer. Try again." : problem.message;
  }
  button.disabled = false;
}

button.addEventListener("click", watch);
document.querySelector("#tab-watch").addEventListener("click", watch, { once: true });
