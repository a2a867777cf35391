// The page: it joins and follows a run, shows the proof of each version, and plays.

import { Board, byId, described, Keyboard, Maps } from "./boards.js";
import { Duel } from "./duel.js";
import { PublicKeys } from "./records.js";
import { Refused } from "./refused.js";
import { Replica, runsOf } from "./replica.js";
import { openBucket } from "./store.js";
import { called, Game, LENGTH, MAX_GUESSES, Player, Words } from "./wordle.js";

const given = new URLSearchParams(location.search);
const own = document.documentElement.dataset;
const place = given.has("bucket")
  ? { bucket: given.get("bucket") ?? "", run: given.get("run") ?? "", keys: given.get("keys") ?? "" }
  : { bucket: own.bucket ?? "", run: own.run ?? "", keys: own.keys ?? "" };

const range = /** @type {HTMLInputElement} */ (byId("slider"));
const buttons = Object.fromEntries(["back", "forward", "newest", "new", "watch"]
  .map((id) => [id, /** @type {HTMLButtonElement} */ (byId(id))]));

/** @param {string} sentence */
function complain(sentence) {
  byId("problem").textContent = sentence;
  byId("problem").hidden = !sentence;
  if (sentence && !replica?.manifest) state("bad", "not joined");
}

/** @param {string} kind @param {string} text */
function state(kind, text) {
  byId("state").className = kind;
  byId("state").textContent = text;
}

/** Do something that may be refused; the page says why. @template T @param {() => Promise<T>} work */
async function explained(work) {
  try {
    return await work();
  } catch (problem) {
    if (!(problem instanceof Refused)) console.error(problem);
    complain(problem instanceof Refused ? problem.message : `This page has a fault: ${problem}`);
    return undefined;
  }
}

// ---- the replica

/** @type {Replica | undefined} */
let replica;
/** What the policy plays with until the weights are exact. @type {{model: import("./delta.js").Model, files: Map<string, Uint8Array>, version: number} | undefined} */
let preview;
/** @type {Maps | undefined} */
let maps;
/** The oldest version that the run still has. @type {number | undefined} */
let oldest;
let pinned = false; // the reader chose a version, so the page does not go to newer ones
let wanted = -1;
const bytes = (/** @type {number} */ n) => (n < 1e5 ? `${(n / 1e3).toFixed(1)} KB` : `${(n / 1e6).toFixed(2)} MB`);

async function follow() {
  if (!globalThis.crypto?.subtle) {
    throw new Refused("This browser checks hashes only on a page from https, localhost or 127.0.0.1: open it from there.");
  }
  const bucket = openBucket(place.bucket);
  if (Number(given.get("poll")) > 0) bucket.pollSeconds = Number(given.get("poll"));
  const started = performance.now();
  let fetched = 0;
  let next = 0;
  let left = 0; // bytes until the weights are exact; only known with a preview
  bucket.onBytes = (size) => {
    fetched += size;
    left -= size;
    if (replica?.manifest || performance.now() < next) return;
    next = performance.now() + 250; // drawing takes time that a slow device needs for the weights
    byId("how").textContent = `fetching: ${bytes(fetched)}`;
    if (preview) estimate();
  };
  const estimate = () => {
    const seconds = Math.ceil((Math.max(left, 0) / fetched) * (performance.now() - started) / 1000);
    byId("exact").textContent = `exact weights in ${seconds} s`;
  };
  const runs = place.run ? [place.run] : await runsOf(bucket);
  if (runs.length !== 1) throw new Refused(`This bucket has ${runs.length} runs: name one of ${runs.join(", ") || "them"}.`);
  replica = new Replica(bucket, runs[0], new PublicKeys(place.keys));
  replica.onCommit = shown;
  replica.onPreview = ({ model, files }, version, more) => {
    if (replica?.manifest) return;
    preview = { model, files, version };
    left = more;
    estimate();
    state("preview", "playing with a preview of the weights");
    byId("number").textContent = `${version}, preview`;
    byId("changes").textContent = "The exact weights are still on their way.";
    rejoined();
  };
  byId("where").textContent = `run ${replica.run} in ${place.bucket}`;
  await replica.follow(new AbortController().signal, {
    wanted: () => !pinned,
    onProblem: (sentence) => {
      complain(sentence);
      grow();
    },
  });
}

/** Let the slider reach all versions. The page keeps only the first and the last one, however many there are. */
function grow() {
  const run = replica;
  const newest = run?.newest?.version;
  if (newest === undefined || !run?.manifest || (oldest !== undefined && range.max === String(newest))) return;
  explained(async () => {
    oldest ??= (await run.versions())[0] ?? newest;
    range.min = String(oldest);
    range.max = String(newest);
    range.disabled = false;
    steer();
    offer();
  });
}

function offer() {
  duel.offer(replica, words, { oldest, newest: Number(range.max) }, given.get("word") ?? "");
}

/** @param {import("./replica.js").Commit} commit */
function shown(commit) {
  const run = /** @type {Replica} */ (replica);
  const manifest = /** @type {import("./records.js").Manifest} */ (run.manifest);
  byId("number").textContent = String(commit.version);
  byId("digest").textContent = commit.digest;
  byId("stated").textContent = manifest.digest;
  byId("equal").textContent = commit.digest === manifest.digest ? "✓ equal" : "✗ differs";
  byId("equal").className = commit.digest === manifest.digest ? "yes" : "no";
  byId("signed").textContent = run.signer ? `✓ by key ${run.signer.slice(-64, -56)}…` : "not checked: the page was given no key";
  byId("signed").title = run.signer;
  const back = commit.moves.filter(({ forward }) => !forward).length;
  const on = commit.moves.length - back;
  const deltas = (/** @type {number} */ n) => `${n} ${n === 1 ? "delta" : "deltas"}`;
  const parts = [commit.from === null && "joined at an anchor", back && `${deltas(back)} undone`, on && `${deltas(on)} applied`];
  const fetched = commit.bytes ? `fetched ${bytes(commit.bytes)}` : "nothing fetched";
  byId("how").textContent = `${parts.filter(Boolean).join(", ")}; ${fetched}; ${commit.ms.toFixed(0)} ms`;
  if (commit.from === null) {
    preview = undefined;
    byId("exact").textContent = "";
    maps = new Maps(byId("maps"), run.model);
    oldest = undefined;
    rejoined();
  }
  const changed = commit.moves.reduce((sum, { patches }) => sum + patches.reduce((all, one) => all + one.places.length, 0), 0);
  byId("changes").textContent = commit.from === null && !changed ? "All weights came from the anchor."
    : `${changed.toLocaleString("en")} changes of ${manifest.total.toLocaleString("en")} weights, from version ${commit.from ?? manifest.anchor.version} to ${commit.version}. A cell is 32 weights.`;
  maps?.light(commit.moves);
  document.body.dataset.version = String(commit.version);
  if (!pinned) wanted = commit.version;
  grow();
  steer();
  replay();
}

function steer() {
  const at = pinned ? wanted : replica?.manifest?.version ?? 0;
  range.value = String(at);
  range.setAttribute("aria-valuetext", `version ${at}`);
  buttons.back.disabled = at <= (oldest ?? at);
  buttons.forward.disabled = at >= Number(range.max);
  buttons.newest.hidden = !pinned;
  state(pinned ? "held" : "live", pinned ? "held at a version" : "following the run");
}

/** Go to the version that was asked for last. @param {number} version */
async function choose(version) {
  if (!replica) return;
  wanted = version;
  pinned = version !== Number(range.max);
  steer();
  await explained(async () => {
    await replica?.busy;
    try {
      if (wanted === version) await replica?.goTo(version);
    } catch (problem) {
      oldest = undefined; // the run may have been pruned, so `grow` asks again
      if (wanted === version) wanted = replica?.manifest?.version ?? version;
      throw problem;
    }
  });
}

range.addEventListener("input", () => choose(Number(range.value)));
buttons.back.addEventListener("click", () => choose(Number(range.value) - 1));
buttons.forward.addEventListener("click", () => choose(Number(range.value) + 1));
buttons.newest.addEventListener("click", () => choose(Number(range.max)));

// ---- the game

const duel = new Duel(explained);
const mine = new Board(byId("mine"));
const its = new Board(byId("its"));
const keyboard = new Keyboard(byId("keys"), press);
const says = byId("says");
/** @type {Words | undefined} */
let words;
/** @type {Game | undefined} */
let game;
/** @type {{game: Game, player: Player | null, stopped: boolean} | undefined} */
let opponent;
let typed = "";
let watching = false;

/** @param {string} secret */
function deal(secret) {
  if (!words) return;
  if (opponent) opponent.stopped = true;
  game = new Game(secret, words);
  opponent = { game: new Game(secret, words), player: null, stopped: false };
  typed = "";
  for (const board of [mine, its]) board.clear();
  keyboard.clear();
}

/** The weights that the policy plays with, and their name. */
function held() {
  if (replica?.manifest) return { holder: replica, name: `version ${replica.manifest.version}` };
  return preview && { holder: preview, name: `a preview of version ${preview.version}` };
}

/** The weights were replaced, so the policy reads its game again, and makes the guesses that it missed. */
function rejoined() {
  buttons.watch.disabled = !words;
  if (!opponent || !game) return;
  opponent.player = null;
  for (let at = opponent.game.moves.length; at < game.moves.length; at++) explained(itsTurn);
}

let turns = Promise.resolve();

/** Let the policy make its next guess, after any guess that it is still writing. */
function itsTurn() {
  turns = turns.catch(() => {}).then(write);
  return turns;
}

/** Let the policy write a guess, each token with the weights that are live at that moment. */
async function write() {
  const one = opponent;
  const now = held();
  if (!one || !game || one.game.over || !now) return;
  if (!watching && !game.over && one.game.moves.length >= game.moves.length) return; // the policy waits for your guess
  const player = one.player ??= new Player(now.holder, one.game);
  const used = new Set([now.name]);
  const text = await player.write(async () => {
    await new Promise((done) => setTimeout(done, 0));
    if (one.player === player) used.add(held()?.name ?? now.name);
  });
  if (one.stopped) return;
  byId("its-name").textContent = `The policy, ${[...used].join(", then ")}`;
  const word = called(text);
  if (word === null) {
    one.game.gaveUp = true;
    says.textContent = "The policy wrote no guess, which ends its game.";
    return;
  }
  const move = one.game.guess(word);
  if (one.player === player) player.read(move); // otherwise the next player reads the whole game
  its.show(one.game.moves.length - 1, move, watching || Boolean(game?.over));
}

async function watch() {
  watching = true;
  says.textContent = "The policy plays.";
  const one = opponent;
  while (one && !one.game.over && !one.stopped) {
    const before = one.game.moves.length;
    await itsTurn();
    if (one.game.moves.length === before) break;
    await new Promise((done) => setTimeout(done, matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : 250));
  }
  if (one && one === opponent && one.game.over) {
    const name = (held()?.name ?? "").replace(/^./, (letter) => letter.toUpperCase());
    says.textContent = one.game.solved ? `${name} solved it in ${one.game.moves.length}. Move the slider to see another version play this word.`
      : `${name} did not find ${one.game.secret.toUpperCase()}. Move the slider to see another version play it.`;
  }
}

/** After a change of the version, the policy plays a watched word again. */
function replay() {
  if (watching && opponent?.game.over && pinned) {
    deal(opponent.game.secret);
    explained(watch);
  }
}

/** @param {string} key */
function press(key) {
  if (!game || game.over || watching) return;
  if (key === "↵") explained(submit);
  else if (key === "⌫") typed = typed.slice(0, -1);
  else if (typed.length < LENGTH) typed += key;
  if (key !== "↵") mine.type(game.moves.length, typed);
}

async function submit() {
  if (!game) return;
  if (typed.length < LENGTH) {
    says.textContent = `A guess has ${LENGTH} letters.`;
    return;
  }
  const move = game.guess(typed);
  typed = "";
  mine.show(game.moves.length - 1, move);
  keyboard.colour(move);
  const left = MAX_GUESSES - game.moves.length;
  says.textContent = move.message || `${described(move)}. ${left} ${left === 1 ? "guess" : "guesses"} left.`;
  if (!game.over) {
    await itsTurn();
    return;
  }
  const over = game;
  while (opponent && opponent.game.secret === over.secret && !opponent.game.over) {
    const before = opponent.game.moves.length;
    await itsTurn();
    if (opponent.game.moves.length === before) break;
  }
  if (game !== over) return;
  opponent?.game.moves.forEach((one, at) => its.show(at, one));
  const scores = [over, opponent?.game].map((one) => (one?.solved ? one.moves.length : MAX_GUESSES + 1));
  const winner = scores[0] === scores[1] ? "Nobody wins" : scores[0] < scores[1] ? "You win" : "The policy wins";
  says.textContent = `${held() ? `${winner}. ` : ""}The word is ${over.secret.toUpperCase()}.`;
  document.body.dataset.outcome = winner;
}

buttons.new.addEventListener("click", async () => {
  if (!words) return;
  watching = false;
  deal(await words.secret());
  says.textContent = "Guess a word of five letters.";
  byId("mine").focus({ preventScroll: true }); // Enter is a guess again
});
buttons.watch.addEventListener("click", async () => {
  if (!words) return;
  deal(await words.secret());
  explained(watch);
});

async function loadWords() {
  const [answers, guesses] = await Promise.all(["answers", "guesses"].map(async (name) => {
    const answer = await fetch(`words/${name}-5.txt`);
    if (!answer.ok) throw new Refused("The word lists are missing: copy env_space/words into the page's folder words.");
    return answer.text();
  }));
  words = new Words(answers, guesses);
  const asked = given.get("word") ?? "";
  deal(words.valid.has(asked) ? asked : await words.secret());
  buttons.watch.disabled = !held();
  offer();
}

// ---- another run

byId("open").addEventListener("submit", (event) => {
  event.preventDefault();
  const fields = new FormData(/** @type {HTMLFormElement} */ (event.target));
  const asked = [...fields].filter(([, value]) => value).map(([name, value]) => [name, String(value)]);
  location.search = new URLSearchParams(asked).toString();
});

explained(loadWords);
explained(follow);
