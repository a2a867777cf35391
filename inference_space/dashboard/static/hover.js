// The values under the pointer, in charts whose `data-x` and `data-y` name a unit and the ends of an axis.
(() => {
  const BOX = 10_000;
  const { html, words } = window.dws.stage;
  const say = {
    step: (x) => `step ${Math.round(x)}`,
    version: (x) => `v${Math.round(x)}`,
    number: words.digits,
    share: words.percent,
    bytes: words.size,
    seconds: words.duration,
    ms: (y) => words.duration(y / 1000),
  };
  const tip = html("div", { class: "tip", "aria-hidden": "true" });

  /** A function from a place on the axis, 0 to 1, to the value there in words. */
  function reader(text) {
    const [unit, first, last, log] = text.split(" "), low = Number(first), high = Number(last);
    if (unit === "ago") return (at) => `${words.duration((1 - at) * (high - low))} ago`;
    return (at) => say[unit](log ? low * (high / low) ** at : low + at * (high - low));
  }

  /** The corners of a path that `Mark.path` in charts.py wrote, as [x, y] in the box of 10,000 x 10,000. */
  function corners(path) {
    let x = 0, y = 0;
    const found = [];
    for (const [, command, a, b] of path.getAttribute("d").matchAll(/([MLHV])([\d.]+)(?: ([\d.]+))?/g)) {
      if (command === "V") y = Number(a);
      else [x, y] = [Number(a), b === undefined ? y : Number(b)];
      if (command !== "H") found.push([x, y]);
    }
    return found;
  }

  function show(event) {
    const plot = event.target.closest?.(".plot[data-x]");
    if (!plot) return tip.remove();
    const box = plot.getBoundingClientRect(), at = ((event.clientX - box.left) / box.width) * BOX;
    const curves = [...plot.querySelectorAll("path:not(.rule, .area)")].map((path) => ({
      colour: path.classList[1], step: path.classList.contains("step"), corners: corners(path),
    }));
    const nearest = (points) => points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
    const x = nearest(curves.filter((one) => one.colour !== "limit").flatMap((one) => one.corners))[0];
    const across = reader(plot.dataset.x), up = reader(plot.dataset.y);
    const lines = curves.flatMap(({ colour, step, corners: all }) => {
      const there = step || colour === "limit" ? all.filter(([place]) => place <= x).at(-1) : all.find(([place]) => place === x);
      return there ? [html("b", { class: colour }, up(1 - there[1] / BOX))] : [];
    });
    tip.replaceChildren(html("span", {}, across(x / BOX)), ...lines);
    plot.closest("#dws").append(tip);
    const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - tip.offsetWidth - 4);
    Object.assign(tip.style, { left: `${left}px`, top: `${event.clientY + 14}px` });
  }

  addEventListener("pointermove", show, { passive: true });
  addEventListener("pointerdown", show, { passive: true }); // a finger does not hover
})();
