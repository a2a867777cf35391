// The policy's tokens beside vLLM's: greedy.json has games that vLLM played (`python -m bench.browser play`).

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import test from "node:test";
import { greedy } from "../src/policy.js";
import { Replica } from "../src/replica.js";
import { called, CALL, END, feedback, Game, Player, Words } from "../src/wordle.js";

/** @param {string} path */
const file = (path) => readFileSync(new URL(path, import.meta.url));
const words = new Words(`${file("../words/answers-5.txt")}`, `${file("../words/guesses-5.txt")}`);

test("feedback, word lists, and a game to its end", async () => {
  assert.equal(feedback("speed", "erase"), "?-??-");
  assert.equal(feedback("geese", "these"), "--+++");
  const hash = (/** @type {string} */ word) => createHash("sha256").update(word).digest("hex");
  const sorted = [...words.answers].sort((a, b) => (hash(a) < hash(b) ? -1 : 1));
  const heldOut = sorted.slice(sorted.length - Math.floor(sorted.length / 10)); // as in env_space/game.py
  assert.equal(heldOut.length, 353);
  assert(hash(heldOut[0]) < "f0");
  assert(heldOut.includes(await words.secret()));
  const game = new Game("crane", words);
  assert.equal(game.guess("slate").observation, "s1-l2-a3+t4-e5+");
  assert.equal(game.guess("qqqqq").observation, "not a word");
  assert.equal(game.guess("crane").observation, "c1+r2+a3+n4+e5+ game over");
  assert(game.over && game.solved);
});

test("greedy tokens are vLLM's", async (t) => {
  const games = JSON.parse(`${file("greedy.json")}`);
  const bucket = { url: "", pollSeconds: 1, get: async (/** @type {string} */ key) => new Uint8Array(file(`../run/${key}`)),
    list: async (/** @type {string} */ prefix) => JSON.parse(`${file("../run/keys.json")}`).filter((/** @type {string} */ key) => key.startsWith(prefix)) };
  const replica = new Replica(bucket, "demo");
  await replica.goTo((await replica.look())?.version ?? 0);
  const config = replica.files.get("config.json") ?? new Uint8Array();
  for (const [other, sentence] of /** @type {[string, RegExp][]} */ ([
    [`${Buffer.from(config)}`.replace('"hidden_size": 128', '"hidden_size": 127'), /does not have the size/],
    [`${Buffer.from(config)}`.replace("Qwen3ForCausalLM", "Other"), /cannot play "Other"/],
    ["null", /not readable/],
  ])) {
    replica.files.set("config.json", new Uint8Array(Buffer.from(other)));
    assert.throws(() => new Player(replica, new Game("crane", words)), sentence);
  }
  replica.files.set("config.json", config);
  for (const name of ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"]) {
    const player = new Player(replica, new Game("crane", words));
    const tensor = replica.model.get(name);
    assert(tensor);
    replica.model.set(name, { ...tensor, dtype: "F16" }); // as many words, so that the size says nothing
    const sentence = new RegExp(`this page cannot play: ${name} is F16, and the page computes only with BF16`);
    assert.throws(() => new Player(replica, new Game("crane", words)), sentence);
    await assert.rejects(player.write(), sentence, "a run that was started again during a game");
    replica.model.set(name, tensor);
  }
  replica.model.set("unused", { dtype: "I64", shape: [4], bits: new Uint16Array(4) });
  const few = Number(process.env.DWS_GAMES ?? 8);
  const counts = { games: 0, solved: 0, tokens: 0, others: 0 };
  const started = performance.now();
  for (const [secret, ...guesses] of games.slice(0, few)) {
    const game = new Game(secret, words);
    const player = new Player(replica, game);
    for (const guess of guesses) {
      const text = guess.includes("<") ? guess : CALL + guess + END;
      for (const token of player.tokenizer.encode(text)) {
        let logits = new Float32Array();
        for (const unread of player.unread) logits = player.policy.read(unread);
        counts.tokens++;
        counts.others += Number(greedy(logits) !== token);
        player.unread = [token];
      }
      const word = called(text);
      if (word !== null) player.read(game.guess(word));
    }
    counts.games++;
    counts.solved += Number(game.solved);
  }
  t.diagnostic(`${JSON.stringify(counts)} ${((performance.now() - started) / 1000).toFixed(1)} s`);
  assert(counts.others <= counts.tokens / 100, "rounding makes one token in a hundred another one at most");
});
