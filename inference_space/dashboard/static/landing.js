// How anchors and deltas land in the bucket, and how a replica that joins late catches up.
(() => {
  const { formulas: f, stage } = window.dws;
  const { svg, html, words } = stage;
  const VERSIONS = 12, BEAT = 0.75;
  const ROW = { A: 196, B: 258 };

  class Picture {
    constructor() {
      this.host = html("div", { class: "landing" });
    }

    build(width) {
      const narrow = width < 560, left = narrow ? 30 : 92, right = narrow ? 8 : 168;
      const pitch = (width - left - right) / (VERSIONS + 1), block = Math.min(26, pitch * 0.7);
      const x = (version) => left + pitch * (version + 0.5);
      Object.assign(this, { x, block, narrow, blocks: {}, replicas: {} });
      const root = svg("svg", { width, height: 296, "aria-hidden": "true" });
      const put = (...parts) => (root.append(...parts), parts[0]);
      put(svg("rect", { class: "bucket", x: 1, y: 22, width: left + pitch * (VERSIONS + 1), height: 124, rx: 12 }));
      if (!narrow) {
        put(svg("text", { class: "lane", x: 14, y: 72 }, "anchors"));
        put(svg("text", { class: "lane", x: 14, y: 134 }, "deltas"));
      }
      this.head = put(svg("g", { class: "head" }, svg("path", { d: "M-5 6h10l-5 7z" }), svg("text", { y: 2, "text-anchor": "middle" }, "HEAD")));
      for (let v = 0; v <= VERSIONS; v++) {
        this.blocks[`anchor${v}`] = put(svg("rect", { class: "block anchor", x: x(v) - block / 2, y: 34, width: block, height: 72, rx: 5 }));
        this.blocks[`delta${v}`] = put(svg("rect", { class: "block delta", x: x(v) - block / 2, y: 122, width: block, height: 12, rx: 4 }));
        put(svg("text", { class: "tick", x: x(v), y: 166, "text-anchor": "middle" }, narrow && v % 2 ? "" : `v${v}`));
      }
      for (const [name, y] of Object.entries(ROW)) this.replica(put, name, y, width, left);
      this.packet = put(svg("rect", { class: "packet", width: block, height: 12, rx: 4 }));
      this.host.replaceChildren(root);
    }

    replica(put, name, y, width, left) {
      put(svg("text", { class: "lane", x: this.narrow ? 2 : 14, y: y + 4 }, this.narrow ? name : `replica ${name}`));
      put(svg("line", { class: "rule", x1: left, x2: this.x(VERSIONS), y1: y, y2: y }));
      this.replicas[name] = {
        y,
        way: put(svg("line", { class: "way", y1: y, y2: y })),
        base: put(svg("rect", { class: "block anchor", y: y - 13, width: 8, height: 26, rx: 3 })),
        dot: put(svg("circle", { class: "replica", cy: y, r: this.narrow ? 9 : 12 })),
        mark: put(svg("text", { class: "mark", y: y + 4, "text-anchor": "middle" })),
        sum: put(svg("text", this.narrow ? { class: "lane", x: left, y: y + 28 } : { class: "lane", x: this.x(VERSIONS) + 26, y: y + 4 })),
      };
    }

    /** Shows all events up to `story[index]`, which is done to `share`. */
    show(story, index, share) {
      const past = story.slice(0, index), [what, version, name] = story[index];
      const done = share >= 0.85 ? [...past, story[index]] : past;
      for (const [key, block] of Object.entries(this.blocks)) {
        const there = done.some(([kind, v]) => `${kind}${v}` === key);
        const lands = !name && `${what}${version}` === key;
        block.classList.toggle("there", there || lands);
        const rises = lands ? (1 - stage.ease(share / 0.8)) * -14 : 0;
        block.setAttribute("transform", `translate(0 ${rises})`);
      }
      const newest = Math.max(...done.filter(([, , to]) => !to).map(([, v]) => v), 0);
      this.head.classList.toggle("there", done.length > 0);
      this.head.setAttribute("transform", `translate(${this.x(newest)} 10)`);
      for (const who of Object.keys(this.replicas)) this.place(who, done);
      this.fly(what, version, name, share);
    }

    place(who, done) {
      const row = this.replicas[who], mine = done.filter(([, , to]) => to === who);
      const taken = mine.filter(([kind]) => kind !== "join");
      const here = mine.length > 0, at = taken.length ? taken[taken.length - 1][1] : mine.length ? mine[0][1] : 0;
      const anchor = taken.find(([kind]) => kind === "take-anchor");
      for (const part of [row.dot, row.mark]) part.classList.toggle("there", here);
      row.dot.classList.toggle("serving", taken.length > 0);
      row.dot.setAttribute("cx", this.x(at));
      row.mark.setAttribute("x", this.x(at));
      row.mark.textContent = taken.length ? String(at) : "?";
      for (const part of [row.way, row.base]) part.classList.toggle("there", Boolean(anchor));
      row.way.setAttribute("x1", this.x(anchor ? anchor[1] : 0));
      row.way.setAttribute("x2", this.x(at));
      row.base.setAttribute("x", this.x(anchor ? anchor[1] : 0) - 4);
      const bytes = taken.reduce((sum, [, , , size]) => sum + size, 0), deltas = taken.length - 1;
      row.sum.textContent = taken.length ? `${words.size(bytes)}: anchor + ${deltas} ${deltas === 1 ? "delta" : "deltas"}` : "";
    }

    fly(what, version, name, share) {
      const flies = what.startsWith("take");
      this.packet.classList.toggle("there", flies && share < 0.85);
      if (!flies) return;
      const anchor = what === "take-anchor", from = anchor ? 94 : 122, to = this.replicas[name].y - 6;
      const y = from + (to - from) * stage.ease(share / 0.85);
      this.packet.setAttribute("class", `packet there ${anchor ? "anchor" : "delta"}`);
      this.packet.classList.toggle("there", share < 0.85);
      this.packet.setAttribute("transform", `translate(${this.x(version) - this.block / 2} ${y})`);
    }
  }

  function caption([what, version, name, size], facts, joins, every) {
    const bytes = words.size(size);
    if (what === "anchor") {
      return version ? `v${version} is also stored whole, ${bytes}: replicas that join later need no older deltas.`
        : `The run begins with v0, an anchor of ${bytes}. HEAD names it.`;
    }
    if (what === "delta") return `One step later: v${version} holds only the weights that changed, ${bytes}.`;
    if (what === "join") return `Replica B starts, or wakes up, at v${version}. It only needs to read the bucket.`;
    if (what === "take-anchor") return `${name} fetches the newest anchor, v${version}: ${bytes}.`;
    const last = version === joins && name === "B";
    if (!last) return `${name} fetches the delta of v${version}, checks its hash and patches its live weights.`;
    return `B is current at v${version} after ${words.size(f.bytes_to_join(facts, every, joins))}. From now on it fetches the same deltas as A.`;
  }

  stage.figures.landing = (figure, facts) => {
    let every = 5, joins = 8, story;
    const picture = new Picture();
    const player = new stage.Player(figure.element, {
      length: 1, rest: 2.5,
      show(at) {
        const index = Math.min(story.length - 1, Math.floor(at / BEAT + 1e-9));
        picture.show(story, index, player.wanted ? Math.min(1, at / BEAT - index) : 1);
        if (figure.captioned !== index) figure.say(caption(story[index], facts, joins, every));
        figure.captioned = index;
      },
    });

    function retell(keep) {
      story = f.landings(facts, VERSIONS, every, joins);
      player.length = story.length * BEAT;
      figure.captioned = -1;
      if (picture.x) keep ? player.seek(Math.min(player.at, player.length)) : player.restart();
    }

    function move(by) {
      player.want(false);
      const index = Math.min(story.length - 1, Math.floor(player.at / BEAT + 1e-9));
      player.seek(Math.max(0, Math.min(story.length - 1, index + by)) * BEAT);
    }
    const back = html("button", { type: "button" }, "Back"), next = html("button", { type: "button" }, "Next");
    back.addEventListener("click", () => move(-1));
    next.addEventListener("click", () => move(1));
    const slide = (label, min, value, then) => stage.slider({
      label, min, max: VERSIONS, value, words: (v) => (label.startsWith("Anchor") ? `${v} versions` : `v${v}`), then(fresh) {
        then(fresh);
        retell(false);
      },
    }).element;
    figure.controls.append(player.button, back, next, slide("B joins at", 1, joins, (v) => (joins = v)),
      slide("Anchor every", 2, every, (v) => (every = v)));
    figure.stage.append(picture.host);
    retell(true);
    stage.fit(picture.host, (width) => {
      picture.build(width);
      retell(true);
      if (!player.wanted) player.seek(player.at || player.length);
    });
  };
})();
