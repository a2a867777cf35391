// Why most weights keep their bits: a small update moves the fp32 value, and the bf16 cast snaps back.
(() => {
  const { formulas: f, stage } = window.dws;
  const { svg, html, words } = stage;
  const BEAT = 0.9, REACH = 2.6; // seconds per step; ticks shown on either side
  const MEAN = 0.65; // of the grid's updates, in learning rates
  const short = (value) => (value === 0 ? "0" : value.toPrecision(6));

  function bitBoxes(before, now) {
    return [...Array(16).keys()].map((at) => {
      const bit = (value) => (value >> (15 - at)) & 1;
      const field = at === 0 ? "sign" : at < 9 ? "exponent" : "mantissa";
      return html("i", { class: `${field}${bit(before) === bit(now) ? "" : " flipped"}` }, String(bit(now)));
    });
  }

  /** The number line around one weight. */
  class Line {
    constructor() {
      this.host = html("div", { class: "numbers" });
      this.bits = html("div", { class: "bits" });
    }

    draw(width, one) {
      const tall = 132, base = 92, tick = f.ulp(one.centre);
      const x = (value) => width / 2 + ((value - one.centre) / tick) * (width / (2 * REACH));
      const shown = one.shown ?? one.master, cast = f.bf16(shown);
      const parts = [svg("line", { class: "rule", x1: 0, x2: width, y1: base, y2: base })];
      for (let n = -3; n <= 3; n++) {
        const value = one.centre + n * tick, kept = value === cast;
        parts.push(svg("line", { class: kept ? "tick on" : "tick", x1: x(value), x2: x(value), y1: base - 13, y2: base + 13 }));
        if (Math.abs(n) <= 2 && (width > 520 || n % 2 === 0)) {
          parts.push(svg("text", { class: "label", x: width > 520 ? x(value) : Math.min(width - 40, Math.max(40, x(value))), y: base + 30, "text-anchor": "middle" }, short(value)));
        }
        parts.push(svg("line", { class: "midpoint", x1: x(value + tick / 2), x2: x(value + tick / 2), y1: base - 38, y2: base + 7 }));
      }
      parts.unshift(svg("rect", { class: "cell", x: x(cast - tick / 2), y: base - 38, width: x(tick) - x(0), height: 45, rx: 4 }));
      one.trail.slice(-60).forEach((value) => parts.push(svg("circle", { class: "trail", cx: x(value), cy: base - 38, r: 2.5 })));
      const from = x(shown), to = x(cast), high = base - 38;
      parts.push(svg("path", { class: "snap", d: `M${from} ${high}C${from} ${high + 24} ${to} ${high + 14} ${to} ${base - 15}` }));
      parts.push(svg("circle", { class: "master", cx: from, cy: high, r: 7 }));
      parts.push(svg("text", { class: "label strong", x: from, y: high - 15, "text-anchor": from < 90 ? "start" : from > width - 90 ? "end" : "middle" },
        `fp32 ${shown.toPrecision(8)}`));
      parts.push(svg("circle", { class: cast === one.before ? "cast" : "cast new", cx: to, cy: base, r: 7 }));
      this.host.replaceChildren(svg("svg", { width, height: tall, "aria-hidden": "true" }, ...parts));
      this.bits.replaceChildren(html("span", {}, "bf16 "), ...bitBoxes(f.bits(one.before), f.bits(cast)));
    }
  }

  /** A grid of weights; a cell lights up when its cast changes. */
  class Grid {
    constructor(grid, columns, pick) {
      this.grid = grid;
      this.element = html("div", { class: "grid", style: `--columns:${columns}`, "aria-hidden": "true" });
      this.cells = grid.weights.map((weight, at) => {
        const height = Math.min(1, Math.max(0, (Math.log2(Math.abs(weight)) + 14) / 10)); // 2^-14 .. 2^-4
        const cell = html("i", { style: `--size:${(20 + 80 * height).toFixed(0)}%` });
        cell.addEventListener("click", () => pick(at));
        return cell;
      });
      this.element.append(...this.cells);
      this.reset();
    }

    reset() {
      const { weights, masters } = this.grid;
      this.values = weights.map((weight, at) => f.bf16(weight) + masters[at] * f.ulp(weight) * 0.999);
      this.steps = this.flips = 0;
      this.cells.forEach((cell) => cell.classList.remove("flip"));
    }

    step(rate) {
      let flips = 0;
      this.cells.forEach((cell, at) => {
        const was = f.bf16(this.values[at]);
        this.values[at] += rate * this.grid.updates[at];
        const flipped = f.bf16(this.values[at]) !== was;
        cell.classList.toggle("flip", flipped);
        flips += flipped;
      });
      this.steps += 1;
      this.flips += flips;
      return flips;
    }
  }

  stage.figures.rounding = (figure, facts, scene) => {
    const { weights, updates } = scene.grid;
    const share = Math.min(0.9, Math.max(1e-5, facts.changed));
    let rate = f.rate_for_share(weights, updates, share), width = 0, one, beats = 0;
    const line = new Line();
    const grid = new Grid(scene.grid, scene.columns, (at) => choose(Math.abs(weights[at])));
    const tally = html("p", { class: "tally" });

    function choose(weight) {
      const start = f.bf16(weight);
      one = { centre: start, master: start - 0.1 * f.ulp(start), before: start, shown: null, trail: [], flipped: false, step: 0 };
      size.set(weight);
      draw();
      caption();
    }

    function draw(fresh = width) {
      width = fresh;
      if (width) line.draw(width, one);
    }

    function step() {
      one.before = f.bf16(one.master);
      one.trail.push(one.master);
      one.from = one.master;
      one.master += MEAN * rate;
      one.flipped = f.bf16(one.master) !== one.before;
      one.step += 1;
      if (Math.abs(one.master - one.centre) > 2.2 * f.ulp(one.centre)) Object.assign(one, { centre: f.bf16(one.master), trail: [] });
      const flips = grid.step(rate);
      one.shown = player.wanted ? one.from : one.master;
      draw();
      caption(flips);
    }

    function glide(share) {
      one.shown = one.from + (one.master - one.from) * stage.ease(share / 0.6);
      draw();
    }

    function caption(flips) {
      const every = (weight) => words.number(Math.max(1, f.ulp(weight) / (MEAN * rate)));
      const moved = `one update moves it by ${words.digits((100 * MEAN * rate) / f.ulp(one.centre))} % of the way to the next number`;
      figure.say(!one.step ? `A weight near ${short(one.centre)}: ${moved}.` : one.flipped
        ? `Step ${one.step}: past the midpoint, so the cast changes. This is what a delta holds.`
        : `Step ${one.step}: the cast snaps back to the same number: nothing to send. A weight of this size flips about once in ${every(one.centre)} steps, one of 0.02 once in ${every(0.02)}.`);
      const expected = f.flip_share(weights, updates, rate), seen = grid.steps ? grid.flips / grid.steps / weights.length : 0;
      tally.replaceChildren(
        html("strong", {}, flips === undefined ? "–" : `${flips} of ${weights.length}`), " flip in this step. Expected ",
        html("strong", {}, words.percent(expected)), `, observed so far ${grid.steps ? words.percent(seen) : "–"}; `,
        `${facts.label} changed `, html("strong", {}, words.percent(facts.changed)), " per sync.");
    }

    const player = new stage.Player(figure.element, {
      length: 1e9, rest: 0,
      show(at) {
        if (Math.floor(at / BEAT) > beats) {
          beats = Math.floor(at / BEAT);
          step();
        }
        if (one.step && player.wanted) glide(at / BEAT - beats);
      },
    });
    const next = html("button", { type: "button" }, "One step");
    next.addEventListener("click", step);
    const size = stage.slider({ label: "Weight", min: 2 ** -16, max: 0.25, value: 0.02, log: true, words: (v) => v.toPrecision(3), then: choose });
    const speed = stage.slider({
      label: "Learning rate", min: 1e-8, max: 3e-3, value: rate, log: true, words: (v) => v.toExponential(1),
      then(fresh) {
        rate = fresh;
        grid.reset();
        choose(one.centre);
      },
    });
    figure.controls.append(player.button, next, speed.element, size.element);
    figure.stage.append(line.host, line.bits, grid.element, tally);
    choose(Math.min(0.2, 6 * MEAN * rate * 1.4 * 2 ** 7)); // it flips every few steps
    stage.fit(line.host, draw);
  };
})();
