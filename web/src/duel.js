// Two versions play the same word with the same random numbers, so only their weights differ.

import { Board, byId } from "./boards.js";
import { called, Game, MAX_GUESSES, Player } from "./wordle.js";

/** @typedef {import("./replica.js").Replica} Replica */
/** @typedef {import("./wordle.js").Words} Words */

export class Duel {
  /** @param {(work: () => Promise<unknown>) => Promise<unknown>} explained shows why something was refused */
  constructor(explained) {
    this.rival = /** @type {HTMLInputElement} */ (byId("rival"));
    this.button = /** @type {HTMLButtonElement} */ (byId("both"));
    this.says = byId("duel-says");
    this.boards = ["left", "right"].map((id) => new Board(byId(id)));
    this.names = ["left-name", "right-name"].map(byId);
    /** @type {Replica | undefined} */
    this.replica;
    /** @type {Words | undefined} */
    this.words;
    this.secret = "";
    this.plays = 0; // the number of plays; a new play ends the play before
    this.button.addEventListener("click", () => explained(async () => {
      this.secret = this.next || (await this.words?.secret()) || "";
      this.next = "";
      await this.play();
    }));
    this.rival.addEventListener("change", () => {
      if (this.secret) explained(() => this.play());
    });
  }

  /**
   * Say what can play. The page calls this again when there is more.
   * @param {Replica | undefined} replica
   * @param {Words | undefined} words
   * @param {{oldest: number | undefined, newest: number}} versions
   * @param {string} next the first word, if it is given
   */
  offer(replica, words, { oldest, newest }, next) {
    [this.replica, this.words, this.next] = [replica, words, this.secret ? "" : next];
    this.rival.min = String(oldest ?? 0);
    this.rival.max = String(newest);
    this.rival.value ||= this.rival.min;
    this.rival.disabled = this.button.disabled = !words || !replica?.manifest || oldest === undefined;
  }

  async play() {
    const { replica, words, secret } = this;
    if (!replica?.manifest || !words || !this.rival.reportValidity()) return;
    const turn = ++this.plays;
    const versions = [replica.manifest.version, Number(this.rival.value)];
    byId("pair").hidden = false;
    this.says.textContent = `Versions ${versions.join(" and ")} play.`;
    versions.forEach((version, side) => {
      this.names[side].textContent = `Version ${version}`;
      this.boards[side].list.ariaLabel = `Guesses of version ${version}`;
      this.boards[side].clear();
    });
    const sides = [];
    for (const version of versions) {
      const game = new Game(secret, words);
      sides.push({ game, player: new Player(await replica.at(version), game) });
      if (turn !== this.plays) return;
    }
    for (let at = 0; at < MAX_GUESSES; at++) {
      for (const [side, { game, player }] of sides.entries()) {
        if (game.over) continue;
        const text = await player.write(() => new Promise((done) => setTimeout(done, 0)));
        if (turn !== this.plays) return;
        const word = called(text);
        if (word === null) {
          game.gaveUp = true;
          continue;
        }
        const move = game.guess(word);
        player.read(move);
        this.boards[side].show(at, move);
      }
    }
    const ends = sides.map(({ game }, side) => {
      const end = game.solved ? `finds it in ${game.moves.length}` : game.gaveUp ? "writes no guess" : "does not find it";
      return `version ${versions[side]} ${end}`;
    });
    this.says.textContent = `The word is ${secret.toUpperCase()}: ${ends.join(", ")}.`;
  }
}
