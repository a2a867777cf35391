// Shared by the four animations: formatted numbers, SVG and HTML elements, sliders and a player.
window.dws = window.dws || {};
(() => {
  function digits(value) {
    return String(Number(value.toPrecision(3)));
  }

  function scaled(count, units) {
    let at = 0;
    for (; Math.abs(count) >= 999.5 && at < units.length - 1; at++) count /= 1000;
    return `${Number(count.toPrecision(3))} ${units[at]}`.trim();
  }

  const words = {
    digits,
    size: (count) => scaled(count, ["B", "KB", "MB", "GB", "TB", "PB"]),
    number: (count) => scaled(count, ["", "K", "M", "B", "T"]),
    percent: (share) => `${digits(100 * share)} %`,
    duration(seconds) {
      if (seconds < 1) return `${digits(1000 * seconds)} ms`;
      if (seconds < 120) return `${digits(seconds)} s`;
      return seconds < 7200 ? `${digits(seconds / 60)} min` : `${digits(seconds / 3600)} h`;
    },
  };

  function make(space, name, attributes, children) {
    const element = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(attributes || {})) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }
  const svg = (name, attributes, ...children) => make("http://www.w3.org/2000/svg", name, attributes, children);
  const html = (name, attributes, ...children) => make("http://www.w3.org/1999/xhtml", name, attributes, children);

  /** A labelled slider; `log` makes its scale logarithmic. `words` formats a value, `then` receives a new one. */
  function slider({ label, min, max, value, step, log, words: say, then }) {
    const inner = log ? Math.log10 : (x) => x, outer = log ? (x) => 10 ** x : (x) => x;
    const output = html("output");
    const input = html("input", {
      type: "range", min: inner(min), max: inner(max), step: step || (log ? 0.01 : 1), "aria-label": label,
    });
    function show(fresh) {
      output.textContent = say(fresh);
      input.setAttribute("aria-valuetext", say(fresh));
    }
    function set(fresh) {
      input.value = inner(fresh);
      show(fresh);
    }
    input.addEventListener("input", () => {
      show(outer(Number(input.value)));
      then(outer(Number(input.value)));
    });
    set(value);
    const element = html("label", { class: "slider" }, html("span", {}, label), input, output);
    return { element, set };
  }

  /** Plays from 0 to `length` seconds in a loop while its figure is visible. */
  class Player {
    constructor(figure, { length, rest = 1.5, show }) {
      const wanted = !matchMedia("(prefers-reduced-motion: reduce)").matches;
      Object.assign(this, { figure, length, rest, show, at: 0, wanted });
      this.button = html("button", { type: "button", class: "play" });
      this.button.addEventListener("click", () => this.want(!this.wanted));
      new IntersectionObserver(([seen]) => this.inSight(seen.isIntersecting), { threshold: 0.35 }).observe(figure);
      this.name();
    }

    inSight(seen) {
      this.seen = seen;
      this.tick();
    }

    want(wanted) {
      if (wanted && this.at >= this.length) this.at = 0;
      this.wanted = wanted;
      this.name();
      this.tick();
    }

    name() {
      this.button.textContent = this.wanted ? "Pause" : "Play";
      this.button.dataset.state = this.wanted ? "playing" : "paused";
      const said = this.figure.querySelector(".said"); // screen readers read only captions that the visitor asked for
      if (said) said.setAttribute("aria-live", this.wanted ? "off" : "polite");
    }

    seek(at) {
      this.at = at;
      this.show(Math.min(at, this.length));
    }

    /** After a control was moved: start over, or show the end if the player is paused. */
    restart() {
      this.seek(this.wanted ? 0 : this.length);
    }

    tick() {
      if (this.looping) return;
      this.looping = true;
      let last = performance.now();
      const frame = (now) => {
        this.looping = Boolean(this.wanted && this.seen && this.figure.isConnected);
        if (!this.looping) return;
        this.at += Math.max(0, Math.min(0.1, (now - last) / 1000));
        last = now;
        if (this.at > this.length + this.rest) this.at = 0;
        this.show(Math.min(this.at, this.length));
        requestAnimationFrame(frame);
      };
      requestAnimationFrame(frame);
    }
  }

  /** Calls `draw(width)` now and whenever the width of `host` changes. */
  function fit(host, draw) {
    let width = 0;
    new ResizeObserver(() => {
      if (host.clientWidth && host.clientWidth !== width) draw((width = host.clientWidth));
    }).observe(host);
  }

  /** Eases a share from 0 to 1: slow at both ends. */
  function ease(share) {
    const x = Math.min(1, Math.max(0, share));
    return x * x * (3 - 2 * x);
  }

  /** Explains the small link that a small model starts with, until the visitor chooses another. */
  function smallLink(facts, link) {
    if (link !== facts.link || link >= 100e6) return "";
    return ` This small model starts on a small link: ${words.size(link)}/s, in proportion to 100 MB/s for a model of 1.19 GB.`;
  }

  const figures = {}; // name -> build(figure, facts, scene), filled in by the four scripts
  window.dws.stage = { words, svg, html, slider, Player, fit, figures, ease, smallLink };
})();
