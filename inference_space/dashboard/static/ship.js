// Two ways to ship the same weights: a broadcast of all weights, and deltas through a bucket.
(() => {
  const { formulas: f, stage } = window.dws;
  const { svg, html, words } = stage;
  const STEPS = 10, PLAY_S = 12, LANE = 26, WIRE = 12, GAP = 8;
  const LANES = { trainer: "trainer", wire: "link", replica: "replica" };

  function rows(narrow) {
    const top = narrow ? 15 : 0, wire = 2 * top + LANE + GAP, replica = wire + top + WIRE + GAP;
    return { trainer: { y: top, tall: LANE }, wire: { y: wire, tall: WIRE }, replica: { y: replica, tall: LANE } };
  }

  function bars(spans, row, x, window, className) {
    return svg("g", { class: className }, ...spans.filter(([, , a]) => a < window).map(([lane, what, a, b]) => {
      const width = Math.max(what === "wait" ? 2 : 1, x(Math.min(b, window)) - x(a));
      return svg("rect", { class: what, x: x(a), y: row[lane].y, width, height: row[lane].tall, rx: 3 });
    }));
  }

  function axis(x, y, window) {
    const step = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600].find((s) => window / s <= 6.5) || window / 5;
    const ticks = [];
    for (let t = 0; t <= window; t += window < 3 ? window / 4 : step) ticks.push(t);
    return ticks.map((t) => svg("text", {
      class: "tick", x: x(t), y, "text-anchor": t === 0 ? "start" : t > 0.97 * window ? "end" : "middle",
    }, t === 0 ? "0 s" : words.duration(t)));
  }

  class Track {
    constructor(title) {
      this.count = html("output", { class: "count" });
      this.idle = html("span", { class: "idle" });
      this.host = html("div", { class: "track" });
      const head = html("div", { class: "head" }, html("h3", {}, title), this.count, this.idle);
      this.element = html("section", {}, head, this.host);
    }

    draw(spans, window, width, name) {
      const narrow = width < 560, left = narrow ? 0 : 64, row = rows(narrow);
      const x = (t) => left + (t / window) * (width - left - 2);
      const bottom = row.replica.y + row.replica.tall;
      Object.assign(this, { spans, window, x });
      this.clip = svg("rect", { x: 0, y: 0, width, height: bottom });
      this.head = svg("line", { class: "playhead", y1: 0, y2: bottom + 4 });
      const labels = Object.entries(LANES).map(([lane, word]) => svg("text", {
        class: "lane", x: narrow ? 0 : left - 10, "text-anchor": narrow ? "start" : "end",
        y: narrow ? row[lane].y - 4 : row[lane].y + row[lane].tall / 2 + 4,
      }, word));
      const picture = svg("svg", { width, height: bottom + 22, "aria-hidden": "true" },
        svg("clipPath", { id: `clip-${name}` }, this.clip), ...labels,
        bars(spans, row, x, window, "ghost"),
        svg("g", { "clip-path": `url(#clip-${name})` }, bars(spans, row, x, window, "solid")),
        this.head, ...axis(x, bottom + 18, window));
      this.host.replaceChildren(picture);
    }

    show(t) {
      const at = this.x(t), done = f.steps_done(this.spans, t + 1e-9);
      this.clip.setAttribute("width", at);
      for (const end of ["x1", "x2"]) this.head.setAttribute(end, at);
      this.count.textContent = `${done} ${done === 1 ? "step" : "steps"}`;
      const [trainer, replica] = ["trainer", "replica"].map((lane) => words.percent(
        t > 0 ? f.idle_share(this.spans, lane, t) : 0));
      this.idle.textContent = `trainer idle ${trainer}, replica idle ${replica}`;
    }
  }

  const HATCH = () => svg("svg", { width: 0, height: 0, "aria-hidden": "true", class: "defs" }, svg("defs", {},
    svg("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse",
      patternTransform: "rotate(45)" },
    svg("rect", { width: 6, height: 6, class: "hatch-page" }), svg("rect", { width: 2.5, height: 6, class: "hatch-line" }))));

  stage.figures.ship = (figure, facts) => {
    const window_s = STEPS * (facts.step_s + facts.diff_s);
    const full = new Track("Broadcast of all weights"), delta = new Track("Deltas through a bucket");
    let link = facts.link, width = 0;
    const player = new stage.Player(figure.element, {
      length: PLAY_S,
      show: (at) => [full, delta].forEach((track) => track.show((at / PLAY_S) * window_s)),
    });

    function draw(fresh = width) {
      width = fresh;
      full.draw(f.broadcast_spans(facts, link, window_s), window_s, width, "full");
      delta.draw(f.delta_spans(facts, link, window_s), window_s, width, "delta");
      const whole = words.duration(f.transfer_s(facts.full_bytes, link));
      const small = words.duration(f.transfer_s(facts.delta_bytes, link));
      figure.say(`At ${words.size(link)}/s all ${words.size(facts.full_bytes)} take ${whole} per step, and both ends `
        + `wait. The ${words.size(facts.delta_bytes)} that changed take ${small} up and ${small} down, in the background: `
        + `the trainer waits ${words.duration(facts.diff_s)} for the diff, a replica ${words.duration(facts.pause_s)} `
        + `for the commit.${stage.smallLink(facts, link)}`);
      player.seek(player.wanted ? player.at : PLAY_S);
    }
    const keys = html("div", { class: "keys" }, ...[["train", "trains"], ["generate", "generates"],
      ["moves", "transfer"], ["wait", "waits"]].map(([css, word]) => html("b", { class: css }, word)));
    figure.stage.append(HATCH(), full.element, delta.element, keys);
    figure.controls.append(player.button, stage.slider({
      label: "Link", min: 1e3, max: 1e10, value: link, log: true, words: (v) => `${words.size(v)}/s`,
      then: (fresh) => ((link = fresh), draw()),
    }).element);
    stage.fit(full.host, draw);
  };
})();
