// One sync end to end: through a bucket, and as a broadcast among machines that can all reach each other.
(() => {
  const { formulas: f, stage } = window.dws;
  const { svg, html, words } = stage;
  const PLAY_S = 8, TALL = 176, BAR = 18;
  const sum = (stages) => stages.reduce((all, [, seconds]) => all + seconds, 0);

  /** The stage at time `t`, and its share that is done. */
  function under(stages, t) {
    let from = 0;
    for (const [name, seconds] of stages) {
      if (t < from + seconds) return [name, (t - from) / seconds];
      from += seconds;
    }
    return ["done", 1];
  }

  class Side {
    constructor(title, about, kind) {
      Object.assign(this, { kind, host: html("div", { class: "net" }), total: html("output", { class: "count" }) });
      this.keys = html("div", { class: "keys" });
      this.element = html("section", {}, html("div", { class: "head" }, html("h3", {}, title), this.total),
        html("p", { class: "about" }, about), this.host, this.keys);
    }

    draw(width, stages, replicas, axis) {
      Object.assign(this, { stages, axis, width, ends: [], wires: [] });
      const middle = TALL / 2, gap = Math.min(54, (TALL - 30) / replicas), r = Math.min(13, gap / 2 - 1.5);
      const spot = (at) => [width - 44, middle + (at - (replicas - 1) / 2) * gap];
      const trainer = [44, middle], bucket = [width / 2, middle];
      const root = svg("svg", { width, height: TALL + BAR + 30, "aria-hidden": "true" });
      const spots = [...Array(replicas).keys()].map(spot);
      const pairs = this.kind === "bucket" ? [[trainer, bucket, "up"], ...spots.map((one) => [bucket, one, "down"])]
        : [trainer, ...spots].slice(1).map((one, at) => [at ? spots[at - 1] : trainer, one, "ring"]);
      for (const [a, b, way] of pairs) this.wire(root, a, b, way);
      this.trainer = this.node(root, trainer, 20, "trainer", "trainer", 36);
      this.replicas = spots.map((one) => this.node(root, one, r, "replica"));
      root.append(svg("text", { class: "lane", x: width - 44, y: Math.min(TALL, spots[replicas - 1][1] + r + 16), "text-anchor": "middle" },
        replicas === 1 ? "replica" : `${replicas} replicas`));
      if (this.kind === "bucket") {
        root.append(svg("path", { class: "can", d: `M${bucket[0] - 24} ${middle - 18}l5 40h38l5 -40z` }),
          svg("ellipse", { class: "can", cx: bucket[0], cy: middle - 18, rx: 24, ry: 7 }),
          svg("text", { class: "lane", x: bucket[0], y: middle + 42, "text-anchor": "middle" }, "bucket"));
      }
      this.bars(root);
      this.host.replaceChildren(root);
      this.keys.replaceChildren(...stages.map(([name, seconds]) => html("b", { class: name }, `${name} ${words.duration(seconds)}`)));
    }

    wire(root, [x1, y1], [x2, y2], way) {
      root.append(svg("line", { class: "rule", x1, y1, x2, y2 }));
      const flow = svg("line", { class: `flow ${way}`, x1, y1, x2: x1, y2: y1 });
      const packet = svg("circle", { class: `packet ${way}`, r: way === "ring" ? 0 : 5 });
      root.append(flow, packet);
      this.wires.push({ way, flow, packet, x1, y1, x2, y2 });
    }

    node(root, [cx, cy], r, css, name, below) {
      const circle = svg("circle", { class: `node ${css}`, cx, cy, r });
      root.append(circle);
      if (name) root.append(svg("text", { class: "lane", x: cx, y: cy + below, "text-anchor": "middle" }, name));
      return circle;
    }

    bars(root) {
      const x = (t) => (t / this.axis) * (this.width - 2) + 1;
      let from = 0;
      for (const [name, seconds] of this.stages) {
        root.append(svg("rect", { class: `part ${name}`, x: x(from), y: TALL + 6, height: BAR, width: Math.max(1.5, x(seconds) - 1), rx: 2 }));
        from += seconds;
      }
      this.playhead = svg("line", { class: "playhead", y1: TALL, y2: TALL + BAR + 12 });
      root.append(this.playhead, svg("text", { class: "tick", x: 1, y: TALL + BAR + 24 }, "0 s"),
        svg("text", { class: "tick", x: this.width - 1, y: TALL + BAR + 24, "text-anchor": "end" }, words.duration(this.axis)));
      this.x = x;
    }

    show(t) {
      const [name, share] = under(this.stages, t), done = name === "done";
      for (const end of ["x1", "x2"]) this.playhead.setAttribute(end, this.x(Math.min(t, this.axis)));
      this.trainer.classList.toggle("stopped", name === "diff" || name === "broadcast");
      this.replicas.forEach((node) => {
        node.classList.toggle("stopped", name === "commit" || name === "broadcast");
        node.classList.toggle("fresh", done);
      });
      const order = this.stages.map(([one]) => one), now = done ? order.length : order.indexOf(name);
      const progress = { up: [order.indexOf("upload"), "upload"], down: [order.indexOf("fetch"), "fetch"], ring: [0, "broadcast"] };
      for (const { way, flow, packet, x1, y1, x2, y2 } of this.wires) {
        const [at, mine] = progress[way], part = name === mine ? share : now > at ? 1 : 0;
        flow.setAttribute("x2", x1 + (x2 - x1) * part);
        flow.setAttribute("y2", y1 + (y2 - y1) * part);
        flow.classList.toggle("over", now > at);
        packet.classList.toggle("there", name === mine);
        packet.setAttribute("transform", `translate(${x1 + (x2 - x1) * part} ${y1 + (y2 - y1) * part})`);
      }
      this.total.textContent = done ? `serving after ${words.duration(sum(this.stages))}` : `${words.duration(t)}: ${name}`;
    }
  }

  function table(facts, link, replicas, [through, whole]) {
    const [lostBucket, lostAll] = f.stopped_s(facts, link, replicas), [few, many] = f.moved_bytes(facts, replicas);
    const { duration, size } = words;
    const rows = [
      ["New weights serve after", duration(sum(through)), duration(sum(whole))],
      ["The trainer waits", duration(facts.diff_s), duration(sum(whole))],
      ["Each replica pauses", duration(facts.pause_s), duration(sum(whole))],
      ["Machine time lost, in total", duration(lostBucket), duration(lostAll)],
      ["Bytes over all links", size(few), size(many)],
      ["Connections", "each machine to the bucket, HTTPS", "all machines to each other"],
    ];
    return html("table", {},
      html("thead", {}, html("tr", {}, html("th", { scope: "col" }, "per sync"), html("th", { scope: "col" }, "bucket"), html("th", { scope: "col" }, "broadcast"))),
      html("tbody", {}, ...rows.map(([name, a, b]) => html("tr", {}, html("th", { scope: "row" }, name), html("td", {}, a), html("td", {}, b)))));
  }

  stage.figures.sync = (figure, facts) => {
    let link = facts.link, replicas = 3, axis = 1, width = 0;
    const bucket = new Side("Delta through a bucket", "Replicas generate during the transfer.", "bucket");
    const whole = new Side("NCCL broadcast of all weights", "All machines stop until all have them.", "ring");
    const numbers = html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "One sync in numbers" });
    const player = new stage.Player(figure.element, {
      length: PLAY_S, show: (at) => [bucket, whole].forEach((side) => side.show((at / PLAY_S) * axis)),
    });

    function draw(fresh = width) {
      width = fresh;
      const stages = [f.bucket_sync(facts, link), f.broadcast_sync(facts, link)];
      axis = Math.max(...stages.map(sum)) * 1.0001;
      bucket.draw(width, stages[0], replicas, axis);
      whole.draw(width, stages[1], replicas, axis);
      numbers.replaceChildren(table(facts, link, replicas, stages));
      const even = f.break_even_link(facts);
      figure.say(link >= even
        ? `With ${words.size(even)}/s or more between all machines, the broadcast serves the new weights sooner: a cluster does not need a bucket for speed.`
        : `Below ${words.size(even)}/s the bucket serves the new weights sooner, and at any speed it pauses a replica for only ${words.duration(facts.pause_s)}.${stage.smallLink(facts, link)}`);
      player.seek(player.wanted ? Math.min(player.at, PLAY_S) : PLAY_S);
    }
    figure.controls.append(player.button,
      stage.slider({ label: "Replicas", min: 1, max: 8, value: replicas, words: String, then: (v) => ((replicas = v), draw()) }).element,
      stage.slider({ label: "Link", min: 1e3, max: 1e11, value: link, log: true, words: (v) => `${words.size(v)}/s`, then: (v) => ((link = v), draw()) }).element);
    figure.stage.append(html("div", { class: "two" }, bucket.element, whole.element), numbers);
    stage.fit(bucket.host, draw);
  };
})();
