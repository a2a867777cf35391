// The slider over the moments of a run, and the slider over its versions.
(() => {
  const { html, slider } = window.dws.stage;

  /** A slider over the moments of a run; its right end is the live page. Returns a function to call when the run moves on. */
  function scrubber(root, source, fill) {
    const bar = root.querySelector(".scrub"), past = root.querySelector("#dws-past");
    const live = html("button", { type: "button" }, "Newest");
    let moments = [], at = null;
    const range = slider({
      label: "Look back", min: 0, max: 1, value: 1, words: (index) => (moments.length ? `v${moments[index]}` : ""),
      then: (index) => go(index),
    });

    function go(index) {
      at = index >= moments.length - 1 ? null : moments[index];
      root.classList.toggle("back", at !== null);
      past.hidden = at === null;
      if (at !== null) fill(past, source.frame(at));
    }

    function refresh() {
      const fresh = source.moments();
      bar.hidden = fresh.length < 3;
      if (fresh.length === moments.length && fresh.at(-1) === moments.at(-1)) return;
      moments = fresh;
      range.element.querySelector("input").max = moments.length - 1;
      const found = at === null || bar.hidden ? -1 : moments.findIndex((version) => version >= at);
      const index = found < 0 ? moments.length - 1 : found;
      range.set(index);
      if (at !== null && moments[index] !== at) go(index); // the moment is gone: show the one that is left
    }
    live.addEventListener("click", () => {
      range.set(moments.length - 1);
      go(moments.length - 1);
    });
    bar.append(range.element, live);
    return refresh;
  }

  /** A slider over all versions, which remembers its choice while another view is open. */
  function picker(host, versions, then) {
    if (!versions.length) {
      host.replaceChildren(html("p", {}, "No delta has been published yet."));
      return;
    }
    const chosen = Number(host.dataset.chosen) || versions.at(-1);
    const found = versions.findIndex((version) => version >= chosen);
    const first = found < 0 ? versions.length - 1 : found;
    let waiting;
    const range = slider({
      label: "Version", min: 0, max: versions.length - 1, value: first, words: (index) => `v${versions[index]}`,
      then(index) {
        host.dataset.chosen = versions[index];
        clearTimeout(waiting); // while the slider moves, ask only for the place where it rests
        waiting = setTimeout(() => then(versions[index]), 120);
      },
    });
    host.replaceChildren(range.element);
    then(versions[first]);
  }

  window.dws.controls = { scrubber, picker };
})();
